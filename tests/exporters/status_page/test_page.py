"""The page is one file that needs nothing from elsewhere."""

import base64
import hashlib
import re

from mp_agent.exporters.status_page.report import snapshot_report, status_page
from tests.agent.node.series.test_snapshot_builder import export
from tools.vendor import ASSETS, PACKAGE

HTML = status_page().body.decode()
POLICY = status_page().headers["Content-Security-Policy"]


def test_everything_is_in_the_file() -> None:
    assert "<!--" not in re.sub(r"<(script|style)>.*?</\1>", "", HTML, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:|metrics|api/)""", HTML)
    assert "@import" not in HTML
    outside = re.findall(r"https?://[^\s\"')]+", HTML)
    # The chart library's banner and the names of XML's spaces are no addresses to load from.
    assert {url.split("/")[2] for url in outside} <= {"github.com", "www.w3.org"}


def test_the_policy_lets_exactly_the_pages_own_scripts_run() -> None:
    scripts = re.findall(r"<script>(.*?)</script>", HTML, flags=re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in POLICY
    assert "default-src 'none'" in POLICY
    assert "'unsafe-eval'" not in POLICY
    assert "script-src 'unsafe-inline'" not in POLICY


def test_names_from_the_job_can_enter_the_page_as_text_only() -> None:
    own = re.findall(r"<script>(.*?)</script>", HTML, flags=re.DOTALL)[1]
    for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way_in not in own


def test_the_page_says_its_language_and_works_on_narrow_screens() -> None:
    assert '<html lang="en">' in HTML
    assert 'content="width=device-width, initial-scale=1"' in HTML


def test_the_chart_library_is_the_version_that_npm_is_asked_for() -> None:
    name, _, version = PACKAGE.partition("@")
    banner = (ASSETS / f"{name}.js").read_text("utf-8").splitlines()[0]
    assert banner.endswith(f"(v{version}) */")
    assert "MIT" in (ASSETS / f"{name}.LICENSE").read_text("utf-8")


def test_every_column_of_a_table_is_in_the_report() -> None:
    own = re.findall(r"<script>(.*?)</script>", HTML, flags=re.DOTALL)[1]
    columns = own[own.index("const COLUMNS = {") : own.index("const stateOf")]
    (run,) = snapshot_report([export()], {}, 1.0)["runs"]
    for table in ("layers", "ranks"):
        text = columns[columns.index(f"  {table}: [") :].split("\n  ],")[0]
        keys = re.findall(r'key: "(\w+)"', text)
        assert len(keys) >= 6 and set(keys) <= set(run[table][0])
