"""Every query of every panel, asked of a real Prometheus that holds the data of real jobs."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from grafana.panel import Panel
from tests.e2e.observatory import Observation, Observatory
from tests.e2e.scenarios import BY_NAME, Scenario
from tools.panel_queries import Asking, every_panel

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.long]

TWO_NODES = Scenario(name="two-nodes", arguments=("healthy",), nodes=2)
RUNS = ("overflow-storm", "calibrating", "explosion", "kill", "two-nodes")
"""All but the last are jobs of tests/e2e/test_alerts.py too, and run once for both."""
MOST_SERIES = 50
"""Of a query: more cannot be told apart in a graph."""

SHOWN: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "overflow-storm": {
        "mp-agent-fleet": (11, 12),
        # Scale, end, alerts, conditions, first non-finite value, loss, loss scale, headroom.
        "mp-agent-run": (2, 6, 10, 11, 14, 15, 20, 21, 25, 27, 37),
        "mp-agent-ranks": (6, 12, 15, 16, 21),
    },
    # Healthy from its first hundred steps on.
    "calibrating": {
        "mp-agent-run": (2, 6, 20, 25, 37, 45),
        "mp-agent-ranks": (6, 12, 15, 16, 17),
    },
    "explosion": {"mp-agent-fleet": (11, 12), "mp-agent-run": (2, 10, 14, 15)},
    "kill": {"mp-agent-fleet": (11,), "mp-agent-run": (2, 6, 10, 37)},
    "two-nodes": {
        "mp-agent-run": (2, 6, 37, 45),
        "mp-agent-ranks": (6, 12, 15, 16, 17),
        # Nodes, and the time since the last push between them.
        "mp-agent-self": (20, 22),
    },
}
"""Panels of which every query has data, though another run may rightly lack it."""

EMPTY: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "overflow-storm": {"mp-agent-ranks": (50, 51, 52, 30, 31, 32)},
    # Nothing is wrong in either, so nothing is said to be; a busy machine can make a rank lag.
    "calibrating": {
        "mp-agent-fleet": (11, 12),
        "mp-agent-run": (10, 11, 14),
        "mp-agent-ranks": (21, 51, 52),
        "mp-agent-layers": (31, 33),
    },
    # FP32: no scaler, and so no headroom.
    "explosion": {"mp-agent-run": (6, 21, 25, 37), "mp-agent-ranks": (21,)},
    "kill": {"mp-agent-run": (11,)},
    # But for alerts: at a sixtieth of their time, a busy machine can make four ranks stall.
    "two-nodes": {
        "mp-agent-fleet": (12,),
        "mp-agent-run": (11, 14),
        "mp-agent-ranks": (21, 52),
        "mp-agent-layers": (12, 31, 33),
    },
}
"""Panels of which no query has data."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A run that is over, and how to ask for its data."""

    asking: Asking
    log: str


@pytest.fixture(scope="module")
def runs(watching: Observatory) -> dict[str, Watched]:
    scenarios = [BY_NAME.get(name, TWO_NODES) for name in RUNS]
    futures = {scenario.name: watching.begin(scenario) for scenario in scenarios}
    return {name: _watched(watching, name, future.result()) for name, future in futures.items()}


def _watched(watching: Observatory, run: str, seen: Observation) -> Watched:
    asking = Asking(
        url=watching.prometheus.url,
        run=run,
        start_unix_seconds=seen.started_unix_seconds,
        end_unix_seconds=seen.ended_unix_seconds,
        scrape_interval_seconds=1,
    )
    return Watched(asking, seen.log)


@pytest.mark.parametrize("run", RUNS)
def test_every_query_runs_and_finds_what_the_run_has(run: str, runs: dict[str, Watched]) -> None:
    watched = runs[run]
    wrong = []
    for board, panel in every_panel():
        shown = panel.id in SHOWN[run].get(board.uid, ())
        empty = panel.id in EMPTY[run].get(board.uid, ())
        for query in panel.queries:
            found = watched.asking.series(panel, query)
            drawn = watched.asking.at_end(query) if query.instant else found
            assert len(drawn) <= MOST_SERIES, (board.uid, panel.title, query.expression)
            if empty and found:
                wrong.append(f"{board.uid} {panel.id} {panel.title} has {found[0]['metric']}")
            elif not found and not empty and (shown or not query.optional):
                wrong.append(f"{board.uid} {panel.id} {panel.title} lacks {query.expression}")
    assert not wrong, "\n".join([*wrong, watched.log])


def panel_of(uid: str, number: int) -> Panel:
    (panel,) = (panel for board, panel in every_panel() if (board.uid, panel.id) == (uid, number))
    return panel


def test_a_conditions_severity_is_its_height(runs: dict[str, Watched]) -> None:
    panel = panel_of("mp-agent-run", 14)
    found = runs["overflow-storm"].asking.series(panel, panel.queries[0])
    heights = {
        series["metric"]["condition"]: max(float(value) for _, value in series["values"])
        for series in found
    }
    assert heights["MpAgentLossScaleAtFloor"] == 3


@pytest.mark.parametrize(("run", "most"), [("overflow-storm", 1), ("calibrating", 0)])
def test_a_run_in_trouble_counts_once_however_much_is_wrong(
    run: str, most: int, runs: dict[str, Watched]
) -> None:
    panel = panel_of("mp-agent-fleet", 2)
    (found,) = runs[run].asking.series(panel, panel.queries[0])
    assert max(float(value) for _, value in found["values"]) == most
