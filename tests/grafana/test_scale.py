"""Dashboards and rules over a synthetic run of some hundred ranks and layers.

`benchmarks/dashboards_at_scale.py` does the same with 4096 ranks, 1000 layers and six hours.
"""

import time
from collections.abc import Iterator

import pytest

from grafana.views import asked
from mp_agent.alerting.rules import rendered_files
from tools.panel_queries import Asking, every_panel
from tools.servers.running import read_json
from tools.synthetic_store import RUN, Size, fill, prometheus_over, record

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

SIZE = Size(ranks=256, layers=200, hours=1, interval_seconds=60)
MOST_SERIES = 50
"""Of a query: more cannot be told apart in a graph."""
_AHEAD_SECONDS = 600


@pytest.fixture(scope="module")
def asking(server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    directory = tmp_path_factory.mktemp("scale")
    binaries = server("promtool"), server("prometheus")
    rules = directory / "rules.yaml"
    (text,) = (text for path, text in rendered_files().items() if path.endswith("rules.yaml"))
    rules.write_text(text)
    end = int(time.time()) + _AHEAD_SECONDS
    fill(binaries[0], directory / "data", SIZE, end)
    record(binaries, directory, rules, SIZE, end)
    with prometheus_over(binaries[1], directory, rules=rules, evaluation_seconds=1) as url:
        yield Asking(
            url=url,
            run=RUN,
            start_unix_seconds=end - SIZE.hours * 3600,
            end_unix_seconds=end,
            scrape_interval_seconds=SIZE.interval_seconds,
        )


def test_no_panel_returns_a_series_per_rank_layer_or_node(asking: Asking) -> None:
    for board, panel in every_panel():
        for query in asked(panel):
            drawn = asking.at_end(query) if query.instant else asking.series(panel, query)
            assert len(drawn) <= MOST_SERIES, (board.uid, panel.title, query.expression)


def test_the_panels_of_ranks_layers_and_nodes_find_all_of_them(asking: Asking) -> None:
    """The store is what it claims to be; else the test above and the benchmark say nothing."""
    by_id = {(board.uid, panel.id): panel for board, panel in every_panel()}
    (ranks,) = asking.at_end(by_id["mp-agent-ranks", 1].queries[0])
    assert float(ranks["value"][1]) == SIZE.ranks
    heatmap = by_id["mp-agent-layers", 1]
    rows = asking.series(heatmap, heatmap.queries[0])
    at_a_moment: dict[float, float] = {}
    for row in rows:
        for at, count in row["values"]:
            at_a_moment[at] = at_a_moment.get(at, 0.0) + float(count)
    assert set(at_a_moment.values()) == {float(SIZE.layers)}
    lags = by_id["mp-agent-ranks", 10]
    counted = [float(row["values"][-1][1]) for row in asking.series(lags, lags.queries[0])]
    assert sum(counted) == SIZE.ranks


def test_every_rule_evaluates_over_it_without_error(asking: Asking) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        groups = read_json(f"{asking.url}/api/v1/rules")["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules):
            break
        time.sleep(0.2)
    assert rules
    assert {rule["health"] for rule in rules} == {"ok"}
