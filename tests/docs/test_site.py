"""The site of the documentation: every page, every link and anchor, every alert's runbook."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.links import runbook_url
from tests.docs.pages import PAGES, ROOT
from tools.docs_site.__main__ import list_versions
from tools.docs_site.pages import toctrees

pytestmark = pytest.mark.long

RELEASE = "1.2.3"


@dataclass
class Links(HTMLParser):
    """The anchors of a page, what it links to and loads, and the entries of its navigation."""

    anchors: set[str] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)
    listed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := given.get(name)))
        target = given.get("href") or given.get("src")
        if target and tag != "form":
            self.targets.add(target)
        if target and given.get("class") == "reference internal":
            self.listed.append(target)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All versions, of which there is one; a warning, as of a link that leads nowhere, fails."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "tools.docs_site", f"v{RELEASE}", "--site", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="session")
def pages(site: Path) -> Mapping[Path, Links]:
    found = {}
    for path in sorted(site.rglob("*.html")):
        if "_static" in path.parts:  # templates of the theme
            continue
        found[path] = Links()
        found[path].feed(path.read_text("utf-8"))
    return found


@pytest.mark.slow
def test_every_link_leads_to_a_file_and_every_anchor_to_a_place(
    site: Path, pages: Mapping[Path, Links]
) -> None:
    followed = 0
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                assert parts.scheme in ("https", "http", "data"), f"{page}: {target}"
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert path.is_file(), f"{page.relative_to(site)}: {target}"
            if parts.fragment and path.suffix == ".html":
                assert unquote(parts.fragment) in pages[path].anchors, f"{page}: {target}"
            followed += 1
    assert followed > 10_000


@pytest.mark.slow
def test_every_page_of_the_documentation_is_there_and_in_the_navigation(
    site: Path, pages: Mapping[Path, Links]
) -> None:
    built = site / RELEASE
    names = [page.relative_to(ROOT).with_suffix(".html") for page in PAGES]
    assert [name for name in names if not (built / name).is_file()] == []
    index = built / "docs" / "index.html"
    listed = {(index.parent / urlsplit(target).path).resolve() for target in pages[index].listed}
    assert {built / name for name in names} - {index} <= listed


@pytest.mark.slow
def test_the_runbook_of_every_alert_is_where_its_link_leads(site: Path) -> None:
    base = f"{site}/latest/alerting/runbooks/{{alert}}.html"
    for condition in CONDITIONS:
        page = Path(runbook_url(base, condition.name))
        assert f"<title>{condition.name} " in page.read_text("utf-8"), page


@pytest.mark.slow
def test_links_to_what_is_no_page_lead_to_the_repository_at_the_tag(
    site: Path, pages: Mapping[Path, Links]
) -> None:
    targets = pages[site / RELEASE / "docs" / "slurm.html"].targets
    address = f"https://github.com/mp-agent/mp-agent/blob/v{RELEASE}/examples/slurm/train.sbatch"
    assert address in targets


@pytest.mark.slow
def test_the_front_page_leads_to_the_latest_version_and_pages_name_theirs(site: Path) -> None:
    assert "url=latest/docs/index.html" in (site / "index.html").read_text("utf-8")
    page = (site / "latest" / "docs" / "alerts.html").read_text("utf-8")
    assert re.search(rf'href="\.\./\.\./versions\.html"[^>]*>{re.escape(RELEASE)}</a>', page)


def test_the_newest_release_is_the_latest_whichever_was_built_last(tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "main"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    list_versions(tmp_path)
    list_versions(tmp_path)
    assert (tmp_path / "latest" / "which").read_text() == "0.10.0"
    listed = re.findall(r">([\d.]+|main)</a>", (tmp_path / "versions.html").read_text())
    assert listed == ["0.10.0", "0.9.0", "main"]


def test_a_page_belongs_where_it_is_linked_first_and_below_its_folder_s_overview() -> None:
    text = (
        "# Title\n\n## One\n\n[a](a.md#x), [l](frameworks/index.md), [b](frameworks/b.md)\n"
        "\n## Two\n\n[c](../C.md), [a](a.md)\n"
    )
    made = toctrees("docs/index", text)
    entries = re.findall(r"^(?::caption: .*|/.*)$", made, re.MULTILINE)
    first = [":caption: One", "/docs/a", "/docs/frameworks/index"]
    assert entries == [*first, ":caption: Two", "/C"]
    below = toctrees("docs/frameworks/index", "[b](b.md), [i](index.md), [a](../a.md)")
    assert re.findall(r"^/.*$", below, re.MULTILINE) == ["/docs/frameworks/b"]
    assert toctrees("docs/a", "[b](b.md)") == ""


@pytest.fixture
def shown(browser: Browser, site: Path) -> Iterator[Page]:
    """A page of a browser to which the site is served."""

    def answer(route: Route) -> None:
        path = site / urlsplit(route.request.url).path.lstrip("/")
        route.fulfill(path=path) if path.is_file() else route.fulfill(status=404)

    page = browser.new_context().new_page()
    page.route("**/*", answer)
    yield page
    page.context.close()


@pytest.mark.slow
@pytest.mark.e2e
def test_the_search_finds_a_runbook(shown: Page) -> None:
    shown.goto("http://docs.test/latest/search.html?q=MpAgentRankStraggler")
    found = shown.locator("#search-results a", has_text="MpAgentRankStraggler")
    expect(found.first).to_be_visible()
    found.first.click()  # the runbook before pages that mention it
    expect(shown.locator("h1")).to_contain_text("MpAgentRankStraggler")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("width", [400, 1280])
def test_pages_fit_the_screen_and_list_their_contents(shown: Page, width: int) -> None:
    shown.set_viewport_size({"width": width, "height": 900})
    for name in ("docs/index", "docs/settings", "docs/alerts", "alerting/runbooks/README"):
        shown.goto(f"http://docs.test/latest/{name}.html")
        assert shown.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, name
    shown.goto("http://docs.test/latest/docs/alerts.html")
    contents = shown.locator(".page-toc a", has_text="MpAgentRankStraggler")
    if width < 1000:
        expect(contents).to_be_hidden()
    else:
        expect(contents).to_be_visible()
