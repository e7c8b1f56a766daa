"""The dashboards keep Grafana's linter's rules, and say what the catalogs say."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import pytest

from grafana.boards import BOARDS
from grafana.boards.others import BOARD_OF_SCOPE, with_unplaced_metrics
from grafana.panel import COLUMNS, Panel, Step, View, unit_of
from grafana.queries import series
from grafana.render import marked, render, rendered_dashboards
from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.expressions import Limit
from mp_agent.catalog.metric import Kind, Metric, Scope
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME, METRICS
from mp_agent.catalog.thresholds import DEFAULTS
from tests.every import for_every
from tests.subtests import each

ROOT = Path(__file__).parents[2]
RENDERED = {board.uid: json.loads(render(board)) for board in BOARDS}
EVERY_BOARD_PANEL = {f"{board.uid}-{panel.id}": panel for board in BOARDS for panel in board.panels}
_RATE = re.compile(r"\b(?:rate|irate|increase)\(([^()]*)\)")
_SERIES_PER_RANK_OR_LAYER = ("rank", "layer")


def panels(uid: str) -> Iterator[dict[str, Any]]:
    """Yield the panels of a dashboard, those of collapsed rows included."""
    for panel in RENDERED[uid]["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


EVERY_PANEL = {f"{uid}-{panel['id']}": panel for uid in RENDERED for panel in panels(uid)}


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def test_the_committed_files_are_what_is_rendered() -> None:
    for path, text in rendered_dashboards().items():
        assert (ROOT / path).read_text("utf-8") == text


def test_uids_are_those_that_links_rely_on() -> None:
    assert [board.uid for board in BOARDS] == [
        "mp-agent-fleet",
        "mp-agent-run",
        "mp-agent-layers",
        "mp-agent-ranks",
        "mp-agent-compare",
        "mp-agent-more",
        "mp-agent-self",
    ]


@for_every(list(RENDERED))
def test_a_dashboard_is_not_editable_and_links_to_the_others_with_variables_and_time(
    uid: str,
) -> None:
    dashboard = RENDERED[uid]
    assert dashboard["editable"] is False
    (link,) = dashboard["links"]
    assert link["tags"] == ["mp-agent"] == dashboard["tags"]
    assert link["includeVars"] is True
    assert link["keepTime"] is True


@for_every(list(RENDERED))
def test_variables_narrow_each_other_and_follow_the_time_range(uid: str) -> None:
    """template-datasource-rule, template-job-rule, template-on-time-change-reload-rule.

    template-instance-rule is left out: series are of runs, and OTLP has no stable instance.
    """
    source, *variables = RENDERED[uid]["templating"]["list"]
    assert (source["name"], source["type"], source["label"]) == (
        "datasource",
        "datasource",
        "Data Source",
    )
    names = [variable["name"] for variable in variables]
    assert names[:4] == ["cluster", "namespace", "job", "run"]
    for position, variable in enumerate(variables):
        assert variable["datasource"]["uid"] == "$datasource"
        assert variable["refresh"] == 2
        narrowing = 3 if variable["name"] == "other_run" else 4
        for earlier in names[: min(position, narrowing)]:
            assert f'{earlier}=~"${earlier}"' in variable["definition"]
    by_name = {variable["name"]: variable for variable in variables}
    # These labels are often not there at all: VictoriaMetrics gives none to what is pushed.
    assert {by_name[name]["allValue"] for name in ("cluster", "namespace", "job")} == {".*"}


@for_every(list(RENDERED))
def test_panel_ids_and_titles_are_unique_and_panels_do_not_overlap(uid: str) -> None:
    own = list(panels(uid))
    assert len({panel["id"] for panel in own}) == len(own)
    assert len({panel["title"] for panel in own}) == len(own)
    taken: set[tuple[int, int]] = set()
    for panel in own:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken
        taken |= cells


@for_every(EVERY_PANEL)
def test_a_panel_has_a_title_a_description_a_unit_and_the_chosen_datasource(
    panel: dict[str, Any],
) -> None:
    """panel-title-description-rule, panel-units-rule, panel-datasource-rule."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}
    assert panel["targets"]


@for_every(EVERY_PANEL)
def test_rates_follow_the_rate_interval_and_counters_are_never_shown_raw_in_a_graph(
    panel: dict[str, Any],
) -> None:
    """target-rate-interval-rule, target-counter-agg-rule."""
    for expression in expressions(panel):
        for inside in _RATE.findall(expression):
            assert inside.endswith(("[$__rate_interval]", "[$__range]")), expression
        if "rate(" in expression or "increase(" in expression:
            assert re.search(r"\b(sum|quantile|histogram_quantile)\b", expression)


@for_every(EVERY_PANEL)
def test_every_selector_of_ours_keeps_to_what_the_variables_select(panel: dict[str, Any]) -> None:
    """target-job-rule; target-instance-rule is left out: a run outlives its pods."""
    for expression in expressions(panel):
        for selector in re.findall(r"\bmp_agent_[\w:]+(\{[^}]*\})?", expression):
            selector = selector.replace('run=~"$other_run"', 'run=~"$run"')
            for label in ("cluster", "namespace", "job", "run"):
                assert f'{label}=~"${label}"' in selector, expression


_ONE_PER_RUN = {"mp_agent_first_nonfinite_info"}
"""Has a label `rank` or `layer`, but at most one series per run."""


def _names_every_rank_or_layer(expression: str) -> bool:
    """Return whether the outermost result has a series per rank or layer, however many."""
    outer = expression.split("(", 1)[0].strip()
    grouping = re.match(r"\w+ by \(([^)]*)\)", expression)
    kept = re.split(r",\s*", grouping[1]) if grouping else []
    bounded = outer in ("topk", "bottomk", "count_values", "quantile", "sum", "min", "max", "count")
    chosen = re.search(r" and on \([^)]*\) \(topk\(", expression)
    return not bounded and not chosen and bool(set(kept) & set(_SERIES_PER_RANK_OR_LAYER))


@for_every(EVERY_PANEL)
def test_no_panel_returns_a_series_per_rank_or_layer(panel: dict[str, Any]) -> None:
    for expression in expressions(panel):
        if not any(name in expression for name in _ONE_PER_RUN):
            assert not _names_every_rank_or_layer(expression), expression


def test_a_metric_that_is_not_in_the_catalog_cannot_be_drawn() -> None:
    with pytest.raises(KeyError):
        series("mp_agent_no_such_metric")
    with pytest.raises(KeyError):
        series("mp_agent_loss_bucket")


def test_every_metric_of_the_catalog_is_on_a_dashboard() -> None:
    text = " ".join(
        expression for uid in RENDERED for panel in panels(uid) for expression in expressions(panel)
    )
    for metric in METRICS:
        assert re.search(rf"\b{metric.prometheus_name}(_bucket)?\b", text), metric.prometheus_name


@each("scope", list(Scope))
@each("kind", [Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM])
def test_a_new_metric_gets_a_panel_from_its_record_alone(scope: Scope, kind: Kind) -> None:
    metric = Metric(
        name="mp_agent.made_up.thing",
        unit="s",
        kind=kind,
        scope=scope,
        help="Something that a later release measures.",
        labels=("flavour",),
        bounds=(1.0,) if kind is Kind.HISTOGRAM else (),
        read=(lambda view: 1.0) if kind is Kind.GAUGE else None,
        count=None if kind is Kind.GAUGE else (lambda change: 1.0),
    )
    extended = with_unplaced_metrics(BOARDS, (metric,))
    (board,) = (new for new, old in zip(extended, BOARDS, strict=True) if new != old)
    assert board.uid == BOARD_OF_SCOPE[scope]
    panel = board.rows[-1].panels[-1]
    assert panel.description == metric.help
    assert panel.title == "Made up thing"
    assert metric.prometheus_name in panel.queries[0].expression
    bare = replace(board, rows=(board.rows[-1],))
    row, *open_panels = json.loads(render(bare))["panels"]
    (drawn,) = row["panels"] or open_panels
    assert drawn["title"] == panel.title


@pytest.mark.slow
def test_a_metric_that_a_board_shows_gets_no_second_panel() -> None:
    assert with_unplaced_metrics(BOARDS, METRICS) == BOARDS


_PLAIN = re.compile(r"(?:max|min|sum) by \([^)]*\) \((mp_agent_\w+)\{[^}]*\}\)")
_PLAIN_NUMBERS = {"short", "none", "sci", "suffix: bits"}


@for_every(EVERY_BOARD_PANEL)
def test_a_metric_is_shown_in_the_unit_of_the_catalog(panel: Panel) -> None:
    units = [(query.expression, panel.unit) for query in panel.queries]
    if panel.view is View.TABLE:
        by_name = {column.name: column.unit for column in panel.columns}
        units = [
            (query.expression, by_name.get(f"Value #{letter}", ""))
            for query, letter in zip(panel.queries, ascii_uppercase, strict=False)
        ]
    for expression, unit in units:
        found = _PLAIN.match(expression)
        metric = found and BY_PROMETHEUS_NAME[found[1]]
        if metric and unit and metric.kind is Kind.GAUGE:
            wanted = unit_of(metric)
            assert unit == wanted or {unit, wanted} <= _PLAIN_NUMBERS, expression


def steps_of(panel: Panel) -> list[Step]:
    """Return all steps of a panel, those of a table's columns too."""
    return [*panel.steps, *(step for column in panel.columns for step in column.steps)]


def limits_in(value: object) -> set[str]:
    """Return the names of all thresholds that an expression compares with, in matchers too."""
    if isinstance(value, Limit):
        return {value.threshold.name}
    if isinstance(value, tuple):
        return {name for part in value for name in limits_in(part)}
    if is_dataclass(value) and not isinstance(value, Metric):
        return {name for field in fields(value) for name in limits_in(getattr(value, field.name))}
    return set()


def limits_of(condition: Condition) -> set[str]:
    """Return those of its expressions, and those that the node agent counts its metrics against."""
    counted = {
        name for level in condition.levels for metric in level.metrics for name in metric.thresholds
    }
    return counted | {name for level in condition.levels for name in limits_in(level.when)}


@for_every(EVERY_BOARD_PANEL)
def test_limits_in_a_panel_are_those_of_alerts_whose_runbooks_it_links(panel: Panel) -> None:
    named = {step.threshold: step.value for step in steps_of(panel) if step.threshold}
    assert named == {name: DEFAULTS[name] for name in named}
    assert set(panel.reaches) <= set(named)
    linked = {condition.name for condition in panel.runbooks}
    for name in named:
        users = {condition.name for condition in CONDITIONS if name in limits_of(condition)}
        # A table would need too many: its runs lead to panels that have them.
        assert users & linked or panel.view is View.TABLE, (name, users)


def test_lines_are_drawn_at_the_limits_that_people_know() -> None:
    drawn = {
        (board.uid, panel.id): [step.value for step in panel.steps if step.value is not None]
        for board in BOARDS
        for panel in board.panels
        if panel.lines
    }
    assert drawn["mp-agent-run", 21] == [1, 128, 1024]
    assert drawn["mp-agent-run", 22] == [0.01, 0.1]
    assert drawn["mp-agent-run", 30] == [1e-6, 0.001, 0.01, 100, 1000]
    assert drawn["mp-agent-run", 25] == [5]
    assert drawn["mp-agent-ranks", 15] == [1.3]


def test_a_line_has_the_colour_of_its_alert() -> None:
    """Grafana draws it in the colour of the step that is further from the transparent one."""
    (panel,) = (panel for panel in panels("mp-agent-run") if panel["id"] == 30)
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [step["color"] for step in steps] == [
        *("red", "orange", "blue", "transparent", "orange", "red")
    ]


def test_the_axis_of_a_norm_reaches_from_limit_to_limit() -> None:
    (panel,) = (panel for panel in panels("mp-agent-run") if panel["id"] == 30)
    ends = [target["expr"] for target in panel["targets"] if target["expr"].startswith("0 * max")]
    assert [float(text.rpartition(" + ")[2]) for text in ends] == [0.001, 1000]
    hidden = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
    assert hidden == {t["refId"] for t in panel["targets"] if t["expr"] in ends}


@for_every(BOARDS, lambda board: board.uid)
def test_no_mark_is_left_and_every_limit_is_one_before(board: Any) -> None:
    name = r"@([a-z_]\w*)@"
    assert not re.findall(name, render(board))
    marks = set(re.findall(name, marked(board)))
    used = {step.threshold for panel in board.panels for step in steps_of(panel)} - {""}
    assert used <= marks <= {*DEFAULTS, "runbook_base"}


@for_every(EVERY_PANEL)
def test_links_of_a_panel_open_runbooks_that_exist(panel: dict[str, Any]) -> None:
    for link in panel.get("links", []):
        page = link["url"].removeprefix("https://mp-agent.example/runbooks/")
        assert (ROOT / "alerting" / "runbooks" / page).is_file(), link["url"]
        assert link["targetBlank"] is True


def test_every_condition_has_its_runbook_on_a_dashboard() -> None:
    linked = {
        condition.name for board in BOARDS for panel in board.panels for condition in panel.runbooks
    }
    assert {condition.name for condition in CONDITIONS} - linked == {"MpAgentRunVanished"}, (
        "that one is of a run that has no series left"
    )


def test_a_panel_that_may_rightly_be_empty_says_what_that_means() -> None:
    for board in BOARDS:
        for panel in board.panels:
            if panel.view is not View.STAT and all(query.optional for query in panel.queries):
                assert panel.nothing, (board.uid, panel.title)


def test_tables_say_which_columns_they_show() -> None:
    for board in BOARDS:
        for panel in board.panels:
            assert bool(panel.columns) == (panel.view is View.TABLE)
            assert set(panel.sort_by) <= {column.title for column in panel.columns}


@for_every(EVERY_BOARD_PANEL)
def test_a_link_of_a_column_leads_to_a_dashboard_with_what_the_row_says(panel: Panel) -> None:
    titles = {column.title for column in panel.columns}
    for column in panel.columns:
        if column.link == "${__value.raw}":
            assert column.name == "url", "only an address is an address"
    own = (column.link for column in panel.columns if column.link != "${__value.raw}")
    for link in filter(None, own):
        path, _, query = link.partition("?")
        assert path.removeprefix("/d/") in RENDERED
        assert "${datasource:queryparam}&${__url_time_range}" in query
        assert set(re.findall(r"\$\{__data\.fields\.(\w+)\}", query)) <= titles


@for_every(EVERY_PANEL)
def test_legends_of_graphs_show_the_last_and_the_largest_value(panel: dict[str, Any]) -> None:
    if panel["type"] == "timeseries":
        assert panel["options"]["legend"]["calcs"] == ["lastNotNull", "max"]


def test_tables_begin_with_the_worst_row() -> None:
    fleet, layers = panel_of("mp-agent-fleet", 10), panel_of("mp-agent-layers", 10)
    assert [by["displayName"] for by in fleet["options"]["sortBy"]][:2] == [
        "Urgency",
        "Worst alert",
    ]
    assert [by["displayName"] for by in layers["options"]["sortBy"]] == [
        "Non-finite elements",
        "Norm",
    ]
    for panel in (fleet, layers):
        assert all(by["desc"] for by in panel["options"]["sortBy"])


def panel_of(uid: str, number: int) -> dict[str, Any]:
    (found,) = (panel for panel in panels(uid) if panel["id"] == number)
    return found


@for_every(EVERY_PANEL)
def test_columns_of_rank_and_node_numbers_are_sorted_as_numbers(panel: dict[str, Any]) -> None:
    if panel["type"] != "table" or panel["title"] == "First non-finite value":
        return  # its rank may be empty, and it has one row
    shown = {
        rename
        for t in panel["transformations"]
        if t["id"] == "organize"
        for rename in t["options"]["renameByName"].values()
    }
    converted = {
        one["targetField"]
        for t in panel["transformations"]
        if t["id"] == "convertFieldType"
        for one in t["options"]["conversions"]
    }
    assert shown & {"Rank", "Node"} == converted


def test_falling_loss_scales_are_red_and_rising_ones_green() -> None:
    panel = panel_of("mp-agent-run", 23)
    colors = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
    }
    assert colors == {"down": "red", "up": "green"}


def test_the_first_panel_of_a_run_is_its_verdict_and_headroom_may_be_negative() -> None:
    verdict = next(panels("mp-agent-run"))
    assert verdict["title"] == "Verdict"
    (mapping,) = verdict["fieldConfig"]["defaults"]["mappings"]
    assert mapping["options"]["0"]["text"] == "healthy"
    assert "min" not in panel_of("mp-agent-run", 37)["fieldConfig"]["defaults"]
