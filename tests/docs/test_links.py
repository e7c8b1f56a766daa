"""Links lead somewhere, the index leads everywhere, and the list of doctor's checks is whole."""

import re
from pathlib import Path
from xml.etree import ElementTree

from mp_agent.doctor.command import MACHINE_CHECKS, PROMETHEUS_CHECKS
from tests.docs.pages import PAGES, ROOT, prose
from tests.every import for_every

_LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@for_every(PAGES)
def test_links_within_the_repository_resolve(page: Path) -> None:
    for path, anchor in _LINK.findall(prose(page)):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path}#{anchor}"


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {path for path, _ in _LINK.findall(prose(index))}
    pages = {page.name for page in PAGES if page.parent == index.parent}
    assert pages - {"index.md"} <= linked


def test_the_list_in_troubleshooting_is_the_doctors() -> None:
    text = prose(ROOT / "docs" / "troubleshooting.md").partition("## The list")[2]
    rows = re.findall(r"^\| ([A-Z][^|]*\?) \|", text, re.MULTILINE)
    assert rows == [check.question for check in (*MACHINE_CHECKS, *PROMETHEUS_CHECKS)]


@for_every(sorted((ROOT / "docs").glob("*.svg")))
def test_drawings_are_whole_and_load_nothing(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text("utf-8"))
    assert root.tag.endswith("svg")
    text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text.replace("HTTP", "")
    assert "<script" not in text
