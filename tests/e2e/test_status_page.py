"""The status page of a real job in a real browser: live, readable, and honest at the end."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.exporters.status_page.report import FORMAT, StepHistory, snapshot_report, status_page
from mp_agent.records.health import LatestValues
from mp_agent.records.views import FirstNonfinite, TrackerLink
from tests.agent.node.builders import merged_step
from tests.exporters.status_page.test_report import CONDITION, TRACKER, stretched, with_view
from tests.waiting import wait_until
from tools.jobs import Job, torchrun_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

JOB = Path(__file__).parent / "job.py"
_MILLISECONDS = 60_000
_CONDITION = "MpAgentNonFiniteUpdate"
_LOSS_SUMMARY = re.compile(r"^loss over steps \d+ to \d+: now \S+")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A run that trains well until it is asked to destroy its weights, and then to end."""
    log_file = tmp_path_factory.mktemp("status") / "job.log"
    environment = {
        "MP_AGENT_LINGER_SECONDS": "120",
        "MP_AGENT_EXIT_WAIT_SECONDS": "0",
        "MP_AGENT_LAYER_INTERVAL": "10",
        "MP_AGENT_PORT": "0",
        "GO": str(log_file.parent / "go"),
    }
    arguments = (str(JOB), "non-finite-on-request")
    with torchrun_job(
        arguments, run="<b>status</b>", log_file=log_file, environment=environment
    ) as started:
        yield started


def violations(page: Page) -> list[str]:
    """Return what axe-core finds wrong with the page as it is now."""
    found = Axe().run(page).response["violations"]
    return [f"{item['id']}: {item['nodes'][0]['html'][:200]}" for item in found]


def open_page(browser: Browser, url: str, problems: list[str], **context: object) -> Page:
    page = browser.new_context(**context).new_page()  # type: ignore[arg-type]
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    return page


def step_shown(page: Page) -> int:
    text = page.locator("#facts div", has_text="Step").first.locator("dd").inner_text()
    return 0 if text == "–" else int(text.replace(",", ""))


def test_the_page_follows_a_run_from_its_first_steps_to_its_end_and_beyond(
    browser: Browser, job: Job, tmp_path: Path
) -> None:
    status = wait_until(job.agent, seconds=90, what=f"the node agent\n{job.log_tail()}")
    problems: list[str] = []
    page = open_page(browser, status.url, problems)
    verdict = page.locator("#verdict")

    expect(verdict).to_contain_text("Training: step", timeout=_MILLISECONDS)
    # The run's name is text, whatever it looks like.
    expect(page.locator("#run-name")).to_have_text("<b>status</b>")
    expect(page.locator("#run-name b")).to_have_count(0)
    before = step_shown(page)
    wait_until(lambda: step_shown(page) > before or None, seconds=30, what="a later step")
    expect(page.locator("#chart-norm canvas")).to_be_visible()
    expect(page.locator("#chart-loss")).to_have_attribute("aria-label", _LOSS_SUMMARY)
    assert violations(page) == []
    _shows_values_under_the_pointer_and_the_last_without(page)

    expect(page.locator("#layers tbody tr")).to_have_count(4, timeout=_MILLISECONDS)
    _sorts_by_name_up_and_down(page)
    page.locator("#layer-filter").fill("weight")
    expect(page.locator("#layers tbody tr")).to_have_count(2)
    expect(page.locator("#ranks tbody tr")).to_have_count(2)

    (job.log_file.parent / "go.bad").touch()
    condition = page.locator("#conditions li.critical", has_text=_CONDITION)
    expect(condition).to_be_visible(timeout=_MILLISECONDS)
    expect(condition).to_contain_text("What to do: ")
    expect(verdict).to_have_attribute("data-worst", "critical")
    assert violations(page) == []

    (job.log_file.parent / "go.end").touch()
    assert job.process.wait(90) == 0, job.log_tail()
    expect(verdict).to_contain_text("Ended: completed at step", timeout=_MILLISECONDS)
    for theme, width in (("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)):
        looks = open_page(
            browser,
            status.url,
            problems,
            color_scheme=theme,
            viewport={"width": width, "height": 900},
        )
        expect(looks.locator("#verdict")).to_contain_text("Ended")
        expect(looks.locator("#chart-norm canvas")).to_be_visible()
        assert violations(looks) == [], (theme, width)
        overhang = "document.documentElement.scrollWidth - innerWidth"
        assert looks.evaluate(overhang) <= 0, (theme, width)
        looks.screenshot(path=tmp_path / f"{theme}-{width}.png", full_page=True)
        looks.context.close()
    assert problems == []

    os.kill(status.pid, signal.SIGKILL)
    stale = page.locator("#stale")
    expect(stale).to_be_visible(timeout=_MILLISECONDS)
    expect(stale).to_contain_text("has not answered since")
    # What was last known stays on the page.
    expect(verdict).to_contain_text("Ended: completed")


def _sorts_by_name_up_and_down(page: Page) -> None:
    header = page.locator("#layers th[data-key=layer]")
    names: Callable[[], list[str]] = page.locator("#layers tbody tr td:first-child").all_inner_texts
    header.get_by_role("button").focus()
    page.keyboard.press("Enter")
    expect(header).to_have_attribute("aria-sort", "ascending")
    assert names() == ["0.bias", "0.weight", "2.bias", "2.weight"]
    page.keyboard.press("Enter")
    expect(header).to_have_attribute("aria-sort", "descending")
    assert names() == ["2.weight", "2.bias", "0.weight", "0.bias"]


def legend_step(page: Page, chart: str) -> int:
    """Return the step whose value a chart's legend shows."""
    text = page.locator(f"#{chart} .u-legend .u-value").first.inner_text()
    return int(text.replace(",", ""))


def _shows_values_under_the_pointer_and_the_last_without(page: Page) -> None:
    plot = page.locator("#chart-norm .u-over")
    plot.scroll_into_view_if_needed()
    place = plot.bounding_box()
    assert place is not None
    page.mouse.move(place["x"] + 1, place["y"] + place["height"] / 2)
    first = legend_step(page, "chart-norm")
    # The pointer is at the same step in all charts.
    assert legend_step(page, "chart-loss") == first
    page.mouse.move(place["x"] + place["width"] - 1, place["y"] + place["height"] / 2)
    assert legend_step(page, "chart-norm") > first
    page.mouse.move(0, 0)
    wait_until(lambda: legend_step(page, "chart-norm") > first or None, seconds=10, what="the last")


def _two_runs() -> dict[str, object]:
    """Return a report of what a young job rarely has: hostile names, another node."""
    offline = TrackerLink(tracker="tensorboard", name="llama", url="file:///tmp/tensorboard/llama")
    hostile_link = TrackerLink(tracker="mlflow", name="script", url="javascript:alert(1)")
    without_the_last = replace(merged_step(9), world_size=8, present_ranks=frozenset(range(7)))
    whole = with_view(
        conditions=(CONDITION,),
        latest=LatestValues(step=without_the_last),
        trackers=(TRACKER, offline, hostile_link),
    )
    hostile = "<script>alert(1)</script>" * 4
    layers = [replace(whole.layers[0], name=name) for name in (hostile, "plain")]
    sources = [
        replace(whole, run="a root", layers=layers),
        replace(whole, run="elsewhere", view=None, layers=[], node_rank=3),
    ]
    return snapshot_report(sources, DEFAULTS, 100.0)


_RECORD_CUT_TEXTS = """
window.cutTexts = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
  const { width } = this.measureText(text), { e, a } = this.getTransform();
  const left = a * (this.textAlign === "right" ? x - width : x) + e;
  if (this.textAlign === "right" && left < 0) window.cutTexts.push([text, left]);
  return fillText.call(this, text, x, y, ...more);
};
"""


@pytest.mark.parametrize("loss", [1.5e7, -2.25e8, 3.4e38, 1e-42])
def test_no_axis_cuts_off_its_labels_however_large_the_values(
    browser: Browser, loss: float
) -> None:
    history = StepHistory()
    for number in range(1, 50):
        history.add(
            merged_step(number, norm=abs(loss), loss=loss * number / 49, loss_scale=2.0**number)
        )
    answers = {
        "/api/v1/snapshot": _two_runs(),
        "/api/v1/history": {"format": FORMAT, "run": "a root", **history.columns()},
    }
    page = browser.new_context().new_page()
    page.add_init_script(_RECORD_CUT_TEXTS)
    page.route("**/*", lambda route: _answer(route, answers))
    page.goto("http://agent.test/")
    for chart in ("loss", "norm", "scale"):
        expect(page.locator(f"#chart-{chart} canvas")).to_be_visible()
    expect(page.locator("#chart-norm .u-legend .u-value").first).to_have_text("49")
    assert page.evaluate("window.cutTexts") == []
    page.context.close()


def test_losses_that_span_decades_have_a_log_axis_and_others_a_linear_one(
    browser: Browser,
) -> None:
    history = StepHistory()
    for number in range(1, 50):
        history.add(merged_step(number, loss=5.0))
    answers: dict[str, object] = {"/api/v1/snapshot": _two_runs()}

    def answer() -> None:
        document = {"format": FORMAT, "run": "a root", **history.columns()}
        answers["/api/v1/history"] = document

    answer()
    page = browser.new_context().new_page()
    page.route("**/*", lambda route: _answer(route, answers))
    page.goto("http://agent.test/")
    caption = page.locator("figure", has=page.locator("#chart-loss")).locator("figcaption")
    expect(caption).to_have_text("Loss")
    history.add(merged_step(50, loss=0.004))
    answer()
    page.reload()
    expect(caption).to_have_text("Loss (log10)")
    expect(page.locator("#chart-loss canvas")).to_be_visible()
    page.context.close()


_BROKEN_WORDS = """
() => {
  const range = document.createRange(), broken = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    for (const word of node.data.matchAll(/\\S+/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map(({ bottom }) => Math.round(bottom)));
      if (lines.size > 1) broken.push(word[0]);
    }
  }
  return broken;
}
"""
"""The words, between spaces and places where they may break, that go over several lines."""

LONG = "model.language_model.layers.31.self_attn.query_key_value_projection.weight"


def _long_names() -> dict[str, object]:
    """Return a report of a run of long names, whose layers are measured less often than was set."""
    whole = stretched()
    condition = replace(
        CONDITION,
        name="MpAgentLossScaleConsecutiveDecreases",
        layer=LONG,
        description=f"The norm of {LONG} was 1e-05, of 0.000123.",
        postmortem=f"Likely: {LONG} overflows.",
    )
    view = replace(
        whole.view,
        conditions=(condition,),
        first_nonfinite=FirstNonfinite(step=584, rank="3", layer=LONG, phase="backward"),
        trackers=(replace(TRACKER, name=LONG),),
        facts={"strategy": "fully_sharded_data_parallel", "precision": "bf16"},
    )
    names = [LONG, *(f"model.layers.{number}.mlp.weight" for number in range(40))]
    layers = [replace(whole.layers[0], name=name) for name in names]
    return snapshot_report([replace(whole, run=LONG, view=view, layers=layers)], DEFAULTS, 100.0)


@pytest.fixture
def narrow_page(browser: Browser) -> Iterator[Page]:
    """The page of that run on a telephone."""
    answers = {
        "/api/v1/snapshot": _long_names(),
        "/api/v1/history": {"format": FORMAT, "run": LONG, **StepHistory().columns()},
    }
    page = browser.new_context(viewport={"width": 400, "height": 800}).new_page()
    page.route("**/*", lambda route: _answer(route, answers))
    page.goto("http://agent.test/")
    expect(page.locator("#layers tbody tr")).to_have_count(41)
    yield page
    page.context.close()


def test_no_word_breaks_on_a_narrow_screen_and_long_names_do_after_separators(
    narrow_page: Page,
) -> None:
    assert narrow_page.evaluate(_BROKEN_WORDS) == []
    for place in ("#run-name", "#facts dd.wide, #facts .wide dd", "#layers td", "#trackers li"):
        box = narrow_page.locator(place, has_text=LONG).first.bounding_box()
        assert box is not None and box["height"] > 40, f"{place}: the name goes over several lines"
    assert narrow_page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


_HEADS_FROM_THE_CORNER = """
box => {
  const place = (one) => one.getBoundingClientRect(), corner = place(box);
  const head = place(box.querySelector("th:nth-child(2)"));
  const name = place(box.querySelector("tr:nth-child(4) td"));
  return [head.top - corner.top, name.left - corner.left];
}
"""
"""How far the row and the column of heads are from the edges at which they stay."""


def test_what_is_scrolled_out_of_sight_is_shown_and_heads_stay(narrow_page: Page) -> None:
    frame = narrow_page.locator(".frame", has=narrow_page.locator("#layers"))
    expect(frame).to_have_attribute("data-more", "right below")
    box = frame.locator(".scroll")
    box.evaluate("box => box.scrollTo(40, 60)")
    expect(frame).to_have_attribute("data-more", "left right above below")
    assert box.evaluate(_HEADS_FROM_THE_CORNER) == [0, 0]
    box.evaluate("box => box.scrollTo(box.scrollWidth, box.scrollHeight)")
    expect(frame).to_have_attribute("data-more", "left above")
    narrow_page.set_viewport_size({"width": 1280, "height": 4000})
    expect(frame).to_have_attribute("data-more", re.compile("^(above|below)?$"))


def test_stretched_intervals_have_their_reason_and_the_probe_s_time_is_a_share(
    narrow_page: Page,
) -> None:
    interval = narrow_page.locator("#layers-interval")
    expect(interval).to_contain_text("Measured on every 400 steps instead of 100, since measuring")
    expect(interval).to_contain_text("overhead_budget")
    expect(interval).to_have_class(re.compile(r"\bnotable\b"))
    expect(narrow_page.locator("#agent")).to_contain_text("Probe, share of a step0.9 %")
    expect(narrow_page.locator("#ranks tbody tr td:last-child")).to_have_text(["0.9 %", "–"])
    assert violations(narrow_page) == []


def _answer(route: Route, answers: Mapping[str, object]) -> None:
    """Answer as an agent that serves the page and these documents."""
    path = urlsplit(route.request.url).path
    if path == "/":
        route.fulfill(body=status_page().body, headers=status_page().headers)
    else:
        route.fulfill(body=json.dumps(answers[path]), content_type="application/json")


def _keeps_the_focus_over_an_update(page: Page, selector: str) -> None:
    page.locator(selector).focus()
    with page.expect_response("**/api/v1/history*"), page.expect_response("**/api/v1/snapshot"):
        pass
    expect(page.locator(selector)).to_be_focused()


def test_what_the_post_mortem_found_is_said_once_for_all_critical_conditions(
    browser: Browser,
) -> None:
    found = "Likely: gradient explosion since step 117."
    names = ("MpAgentGradientExplosion", "MpAgentLossNonFinite", "MpAgentLossScaleAtFloor")
    conditions = tuple(replace(CONDITION, name=name, postmortem=found) for name in names)
    whole = with_view(conditions=conditions)
    answers = {
        "/api/v1/snapshot": snapshot_report([replace(whole, run="a root")], DEFAULTS, 100.0),
        "/api/v1/history": {"format": FORMAT, "run": "a root", **StepHistory().columns()},
    }
    page = browser.new_context(viewport={"width": 400, "height": 800}).new_page()
    page.route("**/*", lambda route: _answer(route, answers))
    page.goto("http://agent.test/")
    expect(page.locator("#conditions li")).to_have_count(3)
    expect(page.get_by_text(found)).to_have_count(1)
    expect(page.locator("#postmortem")).to_contain_text(f"Post-mortem: {found} Report")
    expect(page.locator("#postmortem a")).to_have_attribute("href", "postmortem/a%20root")
    _keeps_the_focus_over_an_update(page, "#postmortem a")
    assert violations(page) == []

    answers["/api/v1/snapshot"] = snapshot_report(
        [replace(with_view(conditions=()), run="a root")], DEFAULTS, 100.0
    )
    expect(page.locator("#postmortem")).to_be_hidden()
    page.context.close()


def test_hostile_names_and_other_nodes_are_shown_without_a_job(browser: Browser) -> None:
    history = StepHistory()
    for number in range(1, 50):
        norm, skipped = 10.0 ** (number % 7 - 3), float(number % 5 == 0)
        history.add(merged_step(number, norm=norm, loss_scale=2.0**number, skipped=skipped))
    answers = {
        "/api/v1/snapshot": _two_runs(),
        "/api/v1/history": {"format": FORMAT, "run": "a root", **history.columns()},
    }
    problems: list[str] = []

    page = browser.new_context(viewport={"width": 360, "height": 800}).new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.route("**/*", lambda route: _answer(route, answers))
    page.goto("http://agent.test/")
    expect(page.locator("#layers tbody tr")).to_have_count(2)
    expect(page.locator("#layers")).to_contain_text("<script>alert(1)</script>")
    expect(page.locator("#facts")).to_contain_text("Missing ranks")
    # Pages are linked; a file or anything else is text.
    link = page.locator("#trackers a")
    expect(link).to_have_count(1)
    expect(link).to_have_text(TRACKER.name)
    expect(link).to_have_attribute("href", TRACKER.url)
    expect(page.locator("#trackers")).to_contain_text("llama, file:///tmp/tensorboard/llama")
    expect(page.locator("#trackers")).to_contain_text("script, javascript:alert(1)")
    _keeps_the_focus_over_an_update(page, "#trackers a")
    expect(page.locator("#chart-scale canvas")).to_be_visible()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0

    page.get_by_label("Run").select_option("elsewhere")
    expect(page.locator("#verdict")).to_contain_text("Node 3 of the run")
    expect(page.locator("#conditions")).to_contain_text("Judged by the root agent")
    expect(page.locator("#layers-section")).to_be_hidden()
    assert violations(page) == []
    assert problems == []
    page.context.close()
