"""The page in a real browser, offline: it draws its plots, and names stay text."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from mp_agent.flight.report_page import as_html
from tests.agent.flight.analyses import EVIL, analysis_of
from tests.agent.flight.builders import calm, overflow
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PLOTS = ("loss", "grad-norm", "loss-scale", "lanes")
RED = "r > g + 80 && r > b + 80 && a > 200"


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Browser, tmp_path: Path) -> Iterator[Page]:
    steps = [*calm(60, loss_scale=65536.0)]
    steps += [overflow(61 + n, 2.0 ** (16 - n)) for n in range(20)]
    file = tmp_path / "page.html"
    file.write_text(as_html(analysis_of(*steps, run=EVIL, name=EVIL, ranks=2)), "utf-8")
    problems: list[str] = []
    context = browser.new_context(offline=True, color_scheme=request.param)
    opened = context.new_page()
    opened.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: problems.append(dialog.message))
    opened.on("requestfailed", lambda request: problems.append(request.url))
    opened.goto(file.as_uri())
    yield opened
    context.close()
    assert problems == []


def red_pixels(page: Page, plot: str) -> int:
    """Return how many pixels of a plot have the colour of what went wrong."""
    script = f"""(canvas) => {{
      const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      let found = 0;
      for (let at = 0; at < data.length; at += 4) {{
        const [r, g, b, a] = data.slice(at, at + 4);
        if ({RED}) found++;
      }}
      return found;
    }}"""
    found: int = page.locator(f"#plot-{plot} canvas").evaluate(script)
    return found


def legend(page: Page, plot: str) -> str:
    cells = page.locator(f"#plot-{plot} .u-legend").locator(".u-label, .u-value")
    return " ".join(cells.all_inner_texts())


def test_every_plot_is_drawn_and_marks_what_went_wrong(page: Page):
    assert page.locator(".plot .uplot").count() == page.locator(".plot").count()
    for plot in PLOTS:
        assert page.locator(f"#plot-{plot} canvas").count() == 1
        # The first bad step is a red line in each of them.
        assert red_pixels(page, plot) > 10, plot
    assert red_pixels(page, "loss-scale") > 3 * red_pixels(page, "loss")


def test_names_stay_text_and_scripts_in_them_do_not_run(page: Page):
    assert page.locator("h1").inner_text().startswith("</script><script>alert(1)")
    assert page.locator("script").count() == 3


def test_the_values_under_the_pointer_are_shown_in_all_plots(page: Page):
    over = page.locator("#plot-loss-scale .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    # Step 61 of 1 to 80: the first that was skipped.
    page.mouse.move(box["x"] + box["width"] * 60 / 79, box["y"] + 40)
    assert legend(page, "loss-scale") == "step 61 scale 65,536 × skipped"
    assert legend(page, "grad-norm") == "step 61 norm – × 3 NaN/Inf"
    assert legend(page, "lanes") == "step 61 ranks rank 0 skipped, rank 1 not delivered"


def test_the_plots_fit_a_narrow_window(page: Page):
    page.set_viewport_size({"width": 480, "height": 800})
    fit = (
        "() => [...document.querySelectorAll('.plot')].every("
        "(box) => box.firstElementChild.offsetWidth <= box.clientWidth)"
    )
    # Not `wait_for_function`: what it evaluates later is forbidden by the page's policy.
    wait_until(lambda: page.evaluate(fit), what="plots that fit")


def test_the_page_is_accessible(page: Page):
    found = Axe().run(page).response["violations"]
    assert [f"{item['id']}: {item['nodes'][0]['html'][:200]}" for item in found] == []
