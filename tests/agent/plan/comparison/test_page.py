"""The pages: self-contained, safe against names, drawn in a real browser."""

import os
import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright
from torch import nn

from mp_agent.plan.comparison.api import compare
from mp_agent.plan.comparison.report import plots_of
from mp_agent.runs.divergence import compare_series
from mp_agent.runs.report import runs_as_html
from tests.agent.plan.comparison.planted import Chain, Overflowing, batch
from tests.agent.runs.series_of import run_of
from tests.waiting import wait_until
from tools.browser import chromium_arguments, find_browser

EVIL = "</script><script>alert(1)</script>"
LIBRARY = re.compile(r"<script>/\*! https://github.com/leeoniya/uPlot.*?</script>", re.DOTALL)


@pytest.fixture(scope="module")
def report():
    model = type(EVIL, (Chain,), {})(Overflowing())
    return compare(model, batch(), nn.CrossEntropyLoss(), dtypes=["fp16", "tf32"])


@pytest.fixture(scope="module")
def pages(report):
    parting = run_of(name=EVIL, loss=lambda step: 2.0 if step < 50 else 3.0)
    return {"precisions": report.as_html(), "runs": runs_as_html(compare_series(run_of(), parting))}


@pytest.mark.parametrize("name", ["precisions", "runs"])
def test_a_page_loads_nothing_and_its_names_are_text(pages, name):
    page = LIBRARY.sub("", pages[name])
    assert not re.search(r"https?:|<link|<img|<iframe|@import|url\(|\ssrc=|\shref=|\son\w+=", page)
    assert page.count("<script") == 2 and "<script>alert" not in page
    own = page.rsplit("<script>", 1)[1]
    for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way_in not in own


def test_nothing_that_is_not_finite_is_plotted_but_it_is_marked(report):
    forward, backward = plots_of(report.candidate("fp16"))
    lost = [index for index, name in enumerate(forward.names or ()) if name == "planted"]
    (plot,) = forward.plots
    assert lost[0] in plot.marks and plot.curves[0].values[lost[0]] is None
    assert [curve.label for curve in plot.curves] == [
        "total",
        "own operations",
        "with modules kept in FP32",
    ]
    assert backward.places == forward.places


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["precisions", "runs"])
def test_a_browser_draws_every_plot(pages, name, scheme, tmp_path: Path):
    chromium = find_browser()
    if chromium is None:
        reason = "Chromium is not on PATH and cannot be installed by this user"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    (tmp_path / "page.html").write_text(pages[name], "utf-8")
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=chromium_arguments())
        page = browser.new_context(offline=True, color_scheme=scheme).new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda one: problems.append(one.text) if one.type == "error" else None)
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.goto((tmp_path / "page.html").as_uri())
        assert page.locator(".plot").count() >= 3
        assert page.locator(".plot .uplot").count() == page.locator(".plot").count()
        found = Axe().run(page).response["violations"]
        assert [f"{item['id']}: {item['nodes'][0]['html'][:200]}" for item in found] == []
        page.set_viewport_size({"width": 480, "height": 800})
        fit = (
            "() => [...document.querySelectorAll('.plot')].every("
            "(box) => box.firstElementChild.offsetWidth <= box.clientWidth)"
        )
        # Not `wait_for_function`: what it evaluates later is forbidden by the page's policy.
        wait_until(lambda: page.evaluate(fit), what="plots that fit")
        browser.close()
    assert problems == []
