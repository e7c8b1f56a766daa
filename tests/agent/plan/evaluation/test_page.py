"""The page: self-contained, finite, drawn in a real browser."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from tests.agent.plan.evaluation.measured import overflowing_evaluation
from tools.browser import chromium_arguments, find_browser

EVIL = "</script><script>alert(1)</script>"
LIBRARY = re.compile(r"<script>/\*! https://github.com/leeoniya/uPlot.*?</script>", re.DOTALL)


@pytest.fixture(scope="module")
def text():
    return replace(overflowing_evaluation(), model=EVIL, notes=(EVIL,)).as_html()


def test_the_page_loads_nothing_and_its_names_are_text(text):
    page = LIBRARY.sub("", text)
    assert not re.search(r"https?:|<link|<img|<iframe|@import|url\(|\ssrc=|\shref=|\son\w+=", page)
    assert page.count("<script") == 2 and "<script>alert" not in page
    assert "NaN" not in page.split("plot-data", 1)[1].split("</script>", 1)[0]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_plot(text, scheme, tmp_path: Path):
    chromium = find_browser()
    if chromium is None:
        reason = "Chromium is not on PATH and cannot be installed by this user"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    (tmp_path / "page.html").write_text(text, "utf-8")
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=chromium_arguments())
        page = browser.new_context(offline=True, color_scheme=scheme).new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda one: problems.append(one.text) if one.type == "error" else None)
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.goto((tmp_path / "page.html").as_uri())
        assert page.locator(".plot").count() == 4
        assert page.locator(".plot .uplot").count() == 4
        found = Axe().run(page).response["violations"]
        assert [f"{item['id']}: {item['nodes'][0]['html'][:200]}" for item in found] == []
        browser.close()
    assert problems == []
