"""The dashboards keep Grafana's linter's rules, and say what the catalogs say."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grafana.boards import BOARDS
from grafana.boards.others import BOARD_OF_SCOPE, with_unplaced_metrics
from grafana.panel import COLUMNS, Board, View
from grafana.queries import series
from grafana.render import render, rendered_dashboards
from mp_agent.catalog.metric import Kind, Metric, Scope
from mp_agent.catalog.metrics import METRICS
from mp_agent.catalog.thresholds import DEFAULTS

ROOT = Path(__file__).parents[2]
RENDERED = {board.uid: json.loads(render(board)) for board in BOARDS}
_RATE = re.compile(r"\b(?:rate|irate|increase)\(([^()]*)\)")
_SERIES_PER_RANK_OR_LAYER = ("rank", "layer")


def panels(uid: str) -> Iterator[dict[str, Any]]:
    """Yield the panels of a dashboard, those of collapsed rows included."""
    for panel in RENDERED[uid]["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


EVERY_PANEL = [
    pytest.param(panel, id=f"{uid}-{panel['id']}") for uid in RENDERED for panel in panels(uid)
]


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
        "mp-agent-self",
    ]


@pytest.mark.parametrize("uid", RENDERED)
def test_a_dashboard_is_not_editable_and_links_to_the_others_with_variables_and_time(
    uid: str,
) -> None:
    dashboard = RENDERED[uid]
    assert dashboard["editable"] is False
    (link,) = dashboard["links"]
    assert link["tags"] == ["mp-agent"] == dashboard["tags"]
    assert link["includeVars"] is True
    assert link["keepTime"] is True


@pytest.mark.parametrize("uid", RENDERED)
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
        for earlier in names[: min(position, 4)]:
            assert f'{earlier}=~"${earlier}"' in variable["definition"]
    by_name = {variable["name"]: variable for variable in variables}
    # A cluster or namespace label is often not there at all.
    assert by_name["cluster"]["allValue"] == by_name["namespace"]["allValue"] == ".*"
    assert by_name["job"]["allValue"] == ".+"


@pytest.mark.parametrize("uid", RENDERED)
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


@pytest.mark.parametrize("panel", EVERY_PANEL)
def test_a_panel_has_a_title_a_description_a_unit_and_the_chosen_datasource(
    panel: dict[str, Any],
) -> None:
    """panel-title-description-rule, panel-units-rule, panel-datasource-rule."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}
    assert panel["targets"]


@pytest.mark.parametrize("panel", EVERY_PANEL)
def test_rates_follow_the_rate_interval_and_counters_are_never_shown_raw_in_a_graph(
    panel: dict[str, Any],
) -> None:
    """target-rate-interval-rule, target-counter-agg-rule."""
    for expression in expressions(panel):
        for inside in _RATE.findall(expression):
            assert inside.endswith(("[$__rate_interval]", "[$__range]")), expression
        if "rate(" in expression or "increase(" in expression:
            assert re.search(r"\b(sum|quantile|histogram_quantile)\b", expression)


@pytest.mark.parametrize("panel", EVERY_PANEL)
def test_every_selector_of_ours_keeps_to_what_the_variables_select(panel: dict[str, Any]) -> None:
    """target-job-rule; target-instance-rule is left out: a run outlives its pods."""
    for expression in expressions(panel):
        for selector in re.findall(r"mp_agent_\w+(\{[^}]*\})?", expression):
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
    return not bounded and bool(set(kept) & set(_SERIES_PER_RANK_OR_LAYER))


@pytest.mark.parametrize("panel", EVERY_PANEL)
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


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("kind", [Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM])
def test_a_new_metric_gets_a_panel_from_its_record_alone(scope: Scope, kind: Kind) -> None:
    metric = Metric(
        name="mp_agent.made_up.thing",
        unit="s",
        kind=kind,
        scope=scope,
        help="Something that a later release measures.",
        labels=("flavour",),
        bounds=(1.0,) if kind is Kind.HISTOGRAM else (),
        **({"read": lambda view: 1.0} if kind is Kind.GAUGE else {"count": lambda change: 1.0}),
    )
    extended = with_unplaced_metrics(BOARDS, (metric,))
    (board,) = (new for new, old in zip(extended, BOARDS, strict=True) if new != old)
    assert board.uid == BOARD_OF_SCOPE[scope]
    panel = board.rows[-1].panels[-1]
    assert panel.description == metric.help
    assert panel.title == "Made up thing"
    assert metric.prometheus_name in panel.queries[0].expression
    bare = replace(board, rows=(board.rows[-1],))
    (drawn,) = json.loads(render(bare))["panels"][0]["panels"]
    assert drawn["title"] == panel.title


def test_a_metric_that_a_board_shows_gets_no_second_panel() -> None:
    assert with_unplaced_metrics(BOARDS, METRICS) == BOARDS


def _steps(board: Board, panel_id: int) -> list[float]:
    (panel,) = (panel for panel in board.panels if panel.id == panel_id)
    return [step.value for step in panel.steps if step.value is not None]


def test_limits_in_panels_are_those_of_the_alerts() -> None:
    by_uid = {board.uid: board for board in BOARDS}
    run = by_uid["mp-agent-run"]
    assert _steps(run, 30) == [
        DEFAULTS[name]
        for name in (
            "grad_norm_vanished",
            "grad_norm_very_low",
            "grad_norm_low",
            "grad_norm_high",
            "grad_norm_extreme",
        )
    ]
    assert _steps(run, 5) == [DEFAULTS["grad_norm_high"], DEFAULTS["grad_norm_extreme"]]
    assert _steps(run, 22) == [DEFAULTS["overflow_warning"], DEFAULTS["overflow_critical"]]
    assert _steps(run, 21) == [128, 1024]


def test_tables_and_timelines_keep_their_size() -> None:
    for board in BOARDS:
        for panel in board.panels:
            if panel.view is View.TABLE:
                assert panel.columns
