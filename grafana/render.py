"""Boards as Grafana's classic JSON, through Grafana's own builders.

What a site may set, thresholds and the address of its runbooks, is rendered as marks first, such
as `@grad_norm_high@`. The chart fills them in; `grafana/dashboards` has the defaults in their
place; and of each of its lines with a mark the package keeps the marked one.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableHide,
    VariableRefresh,
    VariableSort,
)

from grafana.boards import BOARDS
from grafana.panel import COLUMNS, Board
from grafana.queries import RUN, SELECTED, by_run, series
from grafana.views import DATASOURCE, built_panel
from mp_agent.alerting.links import RUNBOOK_BASE
from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.exporters.dashboards import with_values

TAG = "mp-agent"
_ROW_HEIGHT = 1
_DEFAULTS = (("transparent", False), ("repeatDirection", "h"))
"""Of every panel."""


def rendered_dashboards() -> Mapping[str, str]:
    """Return the committed dashboards by path from the repository's root, and their marked lines.

    The chart's own copies are not among them.
    """
    files = {f"grafana/dashboards/{board.uid}.json": render(board) for board in BOARDS}
    lines = {f"{board.uid}.json": _marked_lines(board) for board in BOARDS}
    marks = {"runbook_base": RUNBOOK_BASE, "lines": lines}
    return {**files, "exporters/dashboard_marks.json": json.dumps(marks, indent=1) + "\n"}


def marked_dashboards() -> Mapping[str, str]:
    """Return the dashboards with marks, by file name."""
    return {f"{board.uid}.json": marked(board) for board in BOARDS}


def render(board: Board) -> str:
    """Return a board as classic JSON, with a line per value so that differences read well."""
    return with_values(marked(board), DEFAULTS, RUNBOOK_BASE)


def marked(board: Board) -> str:
    """Return the same with marks for thresholds and for the address of the runbooks."""
    with warnings.catch_warnings():
        # Classic JSON is meant: it is what provisioning, sidecar and operator take.
        warnings.simplefilter("ignore", DeprecationWarning)
        built = json.loads(JSONEncoder(sort_keys=True).encode(_dashboard(board).build()))
    built["panels"] = _laid_out(board, built["panels"])
    return json.dumps(built, indent=1, sort_keys=True) + "\n"


def _marked_lines(board: Board) -> dict[str, str]:
    """Return the lines that have a mark, by number from 0."""
    pairs = zip(marked(board).splitlines(), render(board).splitlines(), strict=True)
    return {str(at): marks for at, (marks, plain) in enumerate(pairs) if marks != plain}


def _dashboard(board: Board) -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time(board.since, "now")
        .timezone("browser")
        .link(
            dashboard.DashboardLink("mp_agent")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    for annotation in _annotations(board):
        made.annotation(_annotation(annotation))
    for variable in _variables(board):
        made.with_variable(variable)
    for panel in board.panels:
        made.with_panel(built_panel(panel))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Annotation:
    """What is marked in all graphs at the times at which its expression has a value."""

    name: str
    color: str
    expression: str
    title: str
    text: str
    tags: str = ""


def _grown(name: str, *keep: str) -> str:
    rise = f"increase({series(name)}[$__rate_interval])"
    return f"sum by ({', '.join(('run', *keep))}) ({rise}) > 0"


_ANNOTATIONS = (
    _Annotation(
        name="Alerts",
        color="red",
        expression=f'ALERTS{{alertname=~"MpAgent.+",alertstate="firing",{SELECTED}}}',
        title="{{alertname}}",
        text="{{severity}}: run {{run}}",
        tags="severity",
    ),
    _Annotation(
        name="Guard",
        color="blue",
        expression=_grown("mp_agent_guard_actions_total", "action", "mode"),
        title="guard: {{action}}",
        text="{{mode}}: run {{run}}",
        tags="action,mode",
    ),
)
_OF_ONE_RUN = (
    _Annotation(
        name="Restarts",
        color="purple",
        expression=_grown("mp_agent_run_attempts_total"),
        title="restart",
        text="run {{run}}",
    ),
    _Annotation(
        name="Checkpoints",
        color="green",
        expression=by_run("mp_agent_phase_info", where='phase="checkpoint"'),
        title="checkpoint",
        text="run {{run}}",
    ),
    _Annotation(
        name="Conditions",
        color="orange",
        expression="max by (run, condition, severity) "
        f"({series('mp_agent_condition_active')} == 1)",
        title="{{condition}}",
        text="{{severity}}: run {{run}}",
        tags="severity",
    ),
)


def _annotations(board: Board) -> tuple[_Annotation, ...]:
    """Return what graphs mark; those against the step have no times to mark."""
    if board.two_runs:
        return ()
    return (*_ANNOTATIONS, *_OF_ONE_RUN) if board.one_run else _ANNOTATIONS


def _annotation(annotation: _Annotation) -> dashboard.AnnotationQuery:
    made = (
        dashboard.AnnotationQuery()
        .name(annotation.name)
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color(annotation.color)
        .expr(annotation.expression)
        .title_format(annotation.title)
        .text_format(annotation.text)
    )
    return made.tag_keys(annotation.tags) if annotation.tags else made


def _variables(board: Board) -> list[Any]:
    """Return the variables; each narrows those after it, and ended runs stay in the list."""
    one_run = board.one_run
    made: list[Any] = [
        dashboard.DatasourceVariable("datasource").label("Data Source").type("prometheus"),
        _labels("cluster", "Cluster", (), all_value=".*"),
        _labels("namespace", "Namespace", ("cluster",), all_value=".*"),
        _labels("job", "Job", ("cluster", "namespace"), all_value=".*"),
        _labels("run", "Run", RUN[:-1], many=not one_run),
    ]
    if board.two_runs:
        made.append(_labels("other_run", "Compared with", RUN[:-1], of="run", many=False))
    if board.layer_variable:
        query = f"label_values({series('mp_agent_layer_grad_norm')}, layer)"
        made.append(_variable("layer", "Layer", query))
    return made


def _labels(
    name: str,
    label: str,
    before: tuple[str, ...],
    *,
    of: str = "",
    all_value: str = ".+",
    many: bool = True,
) -> dashboard.QueryVariable:
    """Return a variable of the values that a label has, `of` where it is called otherwise."""
    matchers = ",".join(f'{earlier}=~"${earlier}"' for earlier in before)
    query = f"label_values(mp_agent_build_info{{{matchers}}}, {of or name})"
    return _variable(name, label, query, all_value=all_value, many=many)


def _variable(
    name: str, label: str, query: str, *, all_value: str = ".+", many: bool = True
) -> dashboard.QueryVariable:
    made = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .definition(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .hide(VariableHide.DONT_HIDE)
        .multi(many)
        .include_all(many)
    )
    return made.all_value(all_value) if many else made


def _without_defaults(panel: dict[str, Any]) -> dict[str, Any]:
    """Return a panel without what Grafana takes for granted: a ConfigMap has a limit."""
    targets = [
        {name: value for name, value in target.items() if (name, value) != ("instant", False)}
        for target in panel.get("targets", ())
    ]
    links = [
        {name: value for name, value in link.items() if value and name != "placement"}
        for link in panel.get("links", ())
    ]
    kept = {name: value for name, value in panel.items() if (name, value) not in _DEFAULTS}
    return {
        **kept,
        **({"targets": targets} if targets else {}),
        **({"links": links} if links else {}),
    }


def _laid_out(board: Board, built: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the panels with their places on the grid, each row under its title."""
    panels = iter(built)
    placed: list[dict[str, Any]] = []
    y = 0
    for number, row in enumerate(board.rows):
        children = []
        title = {
            "type": "row",
            "id": 1000 + number,
            "title": row.title,
            "collapsed": row.collapsed,
            "gridPos": {"h": _ROW_HEIGHT, "w": COLUMNS, "x": 0, "y": y},
        }
        y += _ROW_HEIGHT
        x = line_height = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            made = _without_defaults(next(panels))
            made["gridPos"] = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            children.append(made)
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height
        placed += [{**title, "panels": children if row.collapsed else []}]
        placed += [] if row.collapsed else children
    return placed
