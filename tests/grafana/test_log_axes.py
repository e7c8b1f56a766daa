"""Every log axis is drawn, by the library that Grafana draws with, whatever the values are."""

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

from grafana.boards import BOARDS
from grafana.panel import STEP, Panel
from grafana.render import render
from grafana.views import asked, drawn
from mp_agent.catalog.metric import Kind
from mp_agent.catalog.metrics import METRICS
from tools.browser import chromium_arguments, find_browser
from tools.panel_queries import Asking
from tools.synthetic_store import prometheus_over
from tools.vendor import ASSETS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EXTREMES = ("1e-45", "1e-26", "1.4e-12", "0", "-0.0", "-3", "0.5", "2.6", "65504", "1e38")
RUNS = {
    **{f"always {value}": (value,) * 30 for value in EXTREMES},
    "tiny to huge": ("1e-45", "1e-30", "1", "1e20", "1e38") * 6,
    # Of an explosion in FP32, and of a run whose gradients vanish: the axes that never ended.
    "some layers at 3.7e-43": ("3.7e-43", "4.1", "5e3", "2e-7", "9.9e-25") * 6,
    "vanishing to 2.3e-26": ("1.3", "2e-4", "8e-12", "6e-20", "2.3e-26") * 6,
    "learning": ("2.6", "2.5", "2.4") * 10,
    "through zero": ("-3", "-1e-9", "0", "1e-9", "3") * 6,
}
_INTERVAL_SECONDS = 15
_TIMEOUT_MILLISECONDS = 120_000
LOG_PANELS = [
    pytest.param(panel, id=f"{board.uid}-{panel.id}")
    for board in BOARDS
    for panel in board.panels
    if panel.log_base is not None or panel.log_when
]

# The scale of a log axis as Grafana 12 makes it (its UPlotScaleBuilder).
_DRAW = """
({ times, columns, base, linear }) => {
  window.finished = false;
  setTimeout(() => {
    const range = (plot, low, high) => {
      if (low === null) return [null, null];
      if (linear) return uPlot.rangeAsinh(low, high, base, true);
      return uPlot.rangeLog(low > 0 ? low : 1e-3, high > 0 ? high : 1, base, true);
    };
    const scale = linear ? { distr: 4, asinh: linear } : { distr: 3 };
    const series = columns.map((_, at) => ({ label: String(at), scale: "y", stroke: "red" }));
    new uPlot({
      width: 800, height: 300, series: [{}, ...series],
      scales: { x: { time: true }, y: { ...scale, log: base, range } },
      axes: [{}, { scale: "y" }],
      hooks: { draw: [() => { window.finished = true; }] },
    }, [times, ...columns], document.body);
  }, 0);
}
"""


@pytest.fixture(scope="module")
def asking(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    """A Prometheus in which every gauge of every run has one of the courses of RUNS."""
    directory = tmp_path_factory.mktemp("extremes")
    end = int(time.time()) // _INTERVAL_SECONDS * _INTERVAL_SECONDS
    times = [end - _INTERVAL_SECONDS * back for back in reversed(range(30))]
    text = directory / "extremes.txt"
    text.write_text("".join(samples(times)) + "# EOF\n")
    (directory / "data").mkdir()
    command = ["tsdb", "create-blocks-from", "openmetrics", "--quiet"]
    files = [str(text), str(directory / "data")]
    subprocess.run([server("promtool"), *command, *files], check=True, stdout=subprocess.DEVNULL)
    with prometheus_over(server("prometheus"), directory) as url:
        yield Asking(
            url=url,
            run=".+",
            start_unix_seconds=times[0],
            end_unix_seconds=times[-1],
            scrape_interval_seconds=_INTERVAL_SECONDS,
        )


def samples(times: list[int]) -> Iterator[str]:
    for metric in METRICS:
        if metric.kind is not Kind.GAUGE:
            continue
        for run, values in RUNS.items():
            own = [f'{name}="1"' for name in metric.label_names if name not in ("run", "optimizer")]
            labels = ",".join((f'run="{run}"', 'job="mp-agent"', *own))
            for value, at in zip(values, times, strict=True):
                yield f"{metric.prometheus_name}{{{labels}}} {value} {at}\n"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    chromium = find_browser()
    assert chromium is not None, "Chromium is not on PATH and cannot be installed by this user"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=chromium_arguments())
        page = browser.new_page()
        page.set_content("<body></body>")
        page.add_script_tag(path=ASSETS / "uplot.js")
        yield page
        browser.close()


@pytest.mark.parametrize("panel", LOG_PANELS)
def test_a_log_axis_is_drawn_with_the_smallest_and_largest_values_and_without_any(
    asking: Asking, page: Page, panel: Panel
) -> None:
    queries = [query for query in asked(panel) if query.legend != STEP]
    answers = [row for query in queries for row in asking.series(panel, drawn(panel, query))]
    times = sorted({float(at) for row in answers for at, _ in row["values"]})
    columns = [[dict(row["values"]).get(at) for at in times] for row in answers]
    values = [[None if value is None else float(value) for value in column] for column in columns]
    draw(page, panel, times, values)
    for column in values:  # one run alone
        draw(page, panel, times, [column])
    draw(page, panel, times, [[None] * len(times)])


def draw(page: Page, panel: Panel, times: list[float], columns: list[list[float | None]]) -> None:
    # JSON has no -0.0, and Grafana's own data frames lose it too.
    arguments = json.loads(
        json.dumps(
            {
                "times": times,
                "columns": columns,
                "base": panel.log_base or 10,
                "linear": panel.log_around_zero,
            }
        )
    )
    page.evaluate("document.body.replaceChildren()")
    page.evaluate(_DRAW, arguments)
    page.wait_for_function("window.finished", timeout=_TIMEOUT_MILLISECONDS)


def test_every_logarithmic_axis_of_the_boards_is_among_them() -> None:
    marked = [
        panel
        for board in BOARDS
        for panel in json.loads(render(board))["panels"]
        for panel in (panel, *panel.get("panels", ()))
        if '"type": "log"' in json.dumps(panel) or '"type": "symlog"' in json.dumps(panel)
    ]
    assert len(marked) == len(LOG_PANELS) >= 10


def test_the_library_is_of_the_version_that_grafana_has() -> None:
    assert (
        (ASSETS / "uplot.js")
        .read_text()
        .startswith("/*! https://github.com/leeoniya/uPlot (v1.6.32)")
    )
