"""The page of a backtest: its data, its policy, and that a browser draws it."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from mp_agent.alerting.values import values_in_force
from mp_agent.backtest.past_runs import play
from mp_agent.backtest.report import as_html
from mp_agent.backtest.results import Failure, RunResult
from tests.agent.backtest.builders import broken_points, healthy_points, log_of
from tests.waiting import wait_until
from tools.browser import chromium_arguments, find_browser

NASTY = '</script><b onmouseover="x()">run'


@pytest.fixture(scope="module")
def runs() -> list[RunResult]:
    values = values_in_force()
    return [
        play(log_of(healthy_points(200), name="calm"), values),
        play(log_of(broken_points(200, 151), name=NASTY), values),
    ]


def data_of(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="plot-data">(.*?)</script>', page)
    assert found is not None
    return list(json.loads(found[1]))


def test_the_page_holds_curves_bands_and_what_was_blind(runs) -> None:
    page = as_html(runs, [Failure("gone.csv", "gone.csv: no such file")], settings=("a=1",))
    broken, calm = data_of(page)
    loss, norm = broken["plots"]
    assert (loss["id"], norm["id"]) == ("0-loss", "0-grad_norm")
    assert loss["marks"] == dict.fromkeys(map(str, range(150, 200)), "NaN or Inf")
    assert all(value is None for value in loss["curves"][0]["values"][150:])
    assert broken["spans"][0] == [150, 199, "bad"]
    assert {color for _, _, color in broken["spans"]} == {"bad"}
    assert calm["spans"] == []
    assert "Blind: the log does not hold the gradients of layers" in page
    assert "gone.csv: no such file" in page and "<dt>set</dt><dd>a=1</dd>" in page


def test_names_enter_the_page_as_text(runs) -> None:
    page = as_html(runs, [])
    assert NASTY not in page
    assert "default-src &#39;none&#39;" in page and "http://" not in page.split("</head>")[0]


@pytest.mark.slow
def test_a_browser_draws_every_curve_without_an_error(runs, tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        reason = "Chromium is not on PATH and cannot be installed by this user"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright

    path = tmp_path / "page.html"
    path.write_text(as_html(runs, []), encoding="utf-8")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=str(browser), args=chromium_arguments()
        )
        page = chromium.new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_selector("canvas")
        assert page.locator("canvas").count() == 2
        page.locator("details:not([open]) summary").click()
        # Not `wait_for_function`: what it evaluates later is forbidden by the page's policy.
        wait_until(lambda: page.locator("canvas").count() == 4, what="the other curves")
        chromium.close()
    assert problems == []
