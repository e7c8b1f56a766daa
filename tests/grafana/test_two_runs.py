"""Two runs are drawn against the training step: a real Prometheus gives the points of each."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grafana.boards.compare import COMPARE
from grafana.panel import STEP, Panel
from grafana.render import render
from tests.every import for_every
from tools.panel_queries import Asking
from tools.synthetic_store import prometheus_over

_INTERVAL_SECONDS = 15
_APART_SECONDS = 7200
_STEPS = {
    "first": [10 * number for number in range(1, 31)],
    # It resumes from step 70.
    "second": [*range(7, 147, 7), *range(77, 147, 7)],
}
_LOSS_IS_NAN_FROM_STEP = 280  # in the first run
PANELS = {panel.title: panel for panel in COMPARE.panels}
_METRICS = {
    "mp_agent_loss": "Loss",
    "mp_agent_grad_norm": "Gradient norm",
    "mp_agent_loss_scale": "Loss scale",
    "mp_agent_learning_rate": "Learning rate",
}


def value(run: str, metric: str, step: int) -> float:
    """Return what a run had at a step: another number for each, so that none can be mistaken."""
    return step + 1000 * list(_METRICS).index(metric) + 10_000 * list(_STEPS).index(run)


@pytest.fixture(scope="module")
def asking(
    server: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asking]:
    """A Prometheus that has scraped one run and, two hours later, another."""
    directory = tmp_path_factory.mktemp("two-runs")
    end = int(time.time()) // _INTERVAL_SECONDS * _INTERVAL_SECONDS
    begin = end - 3 * _APART_SECONDS
    text = directory / "runs.txt"
    text.write_text("".join(_samples(begin)) + "# EOF\n")
    (directory / "data").mkdir()
    command = ["tsdb", "create-blocks-from", "openmetrics", "--quiet"]
    files = [str(text), str(directory / "data")]
    subprocess.run([server("promtool"), *command, *files], check=True, stdout=subprocess.DEVNULL)
    with prometheus_over(server("prometheus"), directory) as url:
        yield Asking(
            url=url,
            run="first",
            other_run="second",
            start_unix_seconds=begin,
            end_unix_seconds=end,
            scrape_interval_seconds=_INTERVAL_SECONDS,
        )


def _samples(begin: int) -> Iterator[str]:
    for name in ("mp_agent_step", *_METRICS):
        for number, (run, steps) in enumerate(_STEPS.items()):
            for at, step in enumerate(steps):
                seconds = begin + number * _APART_SECONDS + at * _INTERVAL_SECONDS
                shown = step if name == "mp_agent_step" else value(run, name, step)
                yield f"{name}{{{_labels(run)}}} {shown} {seconds}\n"
    nan = f'mp_agent_nonfinite_since_step{{{_labels("first")},quantity="loss"}}'
    for at, step in enumerate(_STEPS["first"]):
        if step >= _LOSS_IS_NAN_FROM_STEP:
            yield f"{nan} {_LOSS_IS_NAN_FROM_STEP} {begin + at * _INTERVAL_SECONDS}\n"


def _labels(run: str) -> str:
    return f'cluster="c",namespace="n",job="j",run="{run}",instance="a:9464"'


def points(asking: Asking, panel: Panel, pair: slice) -> list[tuple[int, float]]:
    """Return the points that Grafana draws of one run: steps and values of the same times."""
    columns = []
    for query in panel.queries[pair]:
        (series,) = asking.series(panel, query)
        columns.append(dict(series["values"]))
    steps, values = columns
    return [(int(steps[at]), float(values[at])) for at in steps if at in values]


@pytest.mark.e2e
@pytest.mark.parametrize("metric", _METRICS)
def test_each_run_has_its_own_values_at_its_own_steps(asking: Asking, metric: str) -> None:
    panel = PANELS[_METRICS[metric]]
    for run, pair in (("first", slice(0, 2)), ("second", slice(2, 4))):
        steps = set(_STEPS[run])
        if (run, metric) == ("first", "mp_agent_loss"):
            steps = {step for step in steps if step < _LOSS_IS_NAN_FROM_STEP}
        assert set(points(asking, panel, pair)) == {(s, value(run, metric, s)) for s in steps}


@pytest.mark.e2e
def test_a_run_that_resumes_goes_over_its_steps_again(asking: Asking) -> None:
    drawn = [step for step, _ in points(asking, PANELS["Learning rate"], slice(2, 4))]
    until = len(_STEPS["second"])
    assert drawn[:until] == _STEPS["second"]
    assert set(drawn[until:]) == {_STEPS["second"][-1]}, "the last sample, for five minutes"


def test_every_number_that_the_board_shows_is_tested() -> None:
    assert set(_METRICS.values()) == set(PANELS)


RENDERED: dict[str, Any] = json.loads(render(COMPARE))


@for_every({panel["title"]: panel for panel in RENDERED["panels"] if panel["type"] != "row"})
def test_grafana_joins_the_steps_of_a_run_with_its_values_and_draws_them(
    panel: dict[str, Any],
) -> None:
    assert panel["type"] == "xychart"
    assert panel["options"]["mapping"] == "auto", "the first number is x, the second y"
    # Grafana takes the options of a panel without it for those of before 11.1, and drops them.
    assert float(panel["pluginVersion"].rpartition(".")[0]) >= 11.1
    joined = [
        (one["id"], one["options"], one["filter"]["id"], one["filter"]["options"])
        for one in panel["transformations"]
    ]
    inner = {"byField": "Time", "mode": "inner"}
    assert joined == [
        ("joinByField", inner, "byRefId", f"/^(?:{pair})$/") for pair in ("A|B", "C|D")
    ]
    assert [target["refId"] for target in panel["targets"]] == list("ABCD")
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert legends == [STEP, "{{run}}"] * 2
    (override,) = panel["fieldConfig"]["overrides"]
    assert override["matcher"] == {"id": "byName", "options": STEP}
    scale = {one["id"]: one["value"] for one in override["properties"]}["custom.scaleDistribution"]
    assert scale == {"type": "linear"}, "the axis of steps, whatever that of the values is"


def test_the_second_run_is_chosen_as_the_first_one_is_and_there_is_nothing_to_mark() -> None:
    variables = {variable["name"]: variable for variable in RENDERED["templating"]["list"]}
    first, second = variables["run"], variables["other_run"]
    assert first["definition"] == second["definition"]
    assert not first["multi"] and not second["multi"]
    assert RENDERED["annotations"].get("list", []) == []
