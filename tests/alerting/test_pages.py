"""The runbook pages and the alerts reference."""

import re
from pathlib import Path

import pytest

from mp_agent.alerting.conditions import CONDITIONS, Condition
from mp_agent.alerting.durations import DURATIONS
from mp_agent.alerting.pages import (
    RUNBOOKS,
    render_reference,
    render_runbook,
    runbook_pages,
)
from mp_agent.alerting.rules import rendered_files
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.thresholds import THRESHOLDS
from tests.every import for_every

_ROOT = Path(__file__).parents[2]
_VALUES = values_in_force()
_PAGES = runbook_pages(_VALUES)

_by_name = for_every(CONDITIONS, lambda condition: condition.name)


@pytest.mark.slow
def test_the_folder_holds_the_pages_of_the_catalog_and_no_others() -> None:
    found = {str(path.relative_to(_ROOT)) for path in (_ROOT / RUNBOOKS).iterdir()}
    assert found == set(_PAGES)
    assert set(_PAGES) <= set(rendered_files())


@_by_name
def test_a_page_lies_where_the_alert_s_link_leads(condition: Condition) -> None:
    url = condition.annotations(condition.levels[0], _VALUES, "https://r.example")["runbook_url"]
    assert f"{RUNBOOKS}/{url.removeprefix('https://r.example/')}" in _PAGES


@_by_name
def test_a_page_says_all_that_someone_woken_needs(condition: Condition) -> None:
    page, guidance = _PAGES[f"{RUNBOOKS}/{condition.name.lower()}.md"], condition.guidance
    texts = (
        condition.summary,
        condition.meaning,
        guidance.harm,
        condition.confirm,
        guidance.query,
        guidance.reading,
        *guidance.causes,
        *condition.remedies,
        condition.why,
        *guidance.false_positives,
        *(panel.title for panel in guidance.panels),
        *condition.quiet,
    )
    places = [page.find(text) for text in texts]
    assert -1 not in places, texts[places.index(-1)]
    for name in guidance.samples:
        assert (_ROOT / "alerting" / "samples" / f"{name}.py").read_text().strip() in page


@_by_name
def test_headings_stand_in_the_order_in_which_they_are_needed(condition: Condition) -> None:
    page = render_runbook(condition, _VALUES)
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    assert re.findall(r"^## (.*)$", prose, flags=re.MULTILINE) == [
        "Severity",
        "Confirm",
        "Likely causes, most likely first",
        "What to do",
        "False positives",
        "Exact condition",
    ]


@pytest.mark.slow
def test_links_between_the_pages_lead_somewhere() -> None:
    files = rendered_files()
    pages = {path: text for path, text in files.items() if path.endswith(".md")}
    assert len(pages) == len(CONDITIONS) + 2
    for path, text in pages.items():
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            target = (_ROOT / path).parent.joinpath(link).resolve()
            relative = str(target.relative_to(_ROOT))
            assert relative in files or target.exists(), f"{path}: {link}"


def test_the_reference_lists_every_alert_threshold_and_duration() -> None:
    page = render_reference(_VALUES)
    for condition in CONDITIONS:
        assert f"\n### {condition.name}\n" in page
        assert f"[`{condition.name}`](#{condition.name.lower()})" in page
        assert f"({'../' + RUNBOOKS}/{condition.name.lower()}.md)" in page
    for known in (*THRESHOLDS, *DURATIONS):
        assert f"| `{known.name}` |" in page
    assert "<!-- overview -->" not in page


def test_the_numbers_of_a_site_reach_page_and_reference() -> None:
    values = values_in_force({"grad_norm_high": 51}, {"stall_window": 61})
    assert "> 61" in runbook_pages(values)[f"{RUNBOOKS}/mpagentrunstalled.md"]
    assert "`grad_norm_high` = 51:" in render_reference(values)
    assert "`stall_window` = 1m1s:" in render_reference(values)


def test_the_noise_table_is_of_the_conditions_that_there_are() -> None:
    table = (_ROOT / "alerting" / "pages" / "noise.md").read_text()
    measured = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    again = "measure it again: python -m tests.alerting.noise --write"
    assert measured == [condition.name for condition in CONDITIONS], again
