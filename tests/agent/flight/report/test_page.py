"""The page: whole, self-contained, and safe against what names may hold."""

import base64
import hashlib
import json
import re
import subprocess
import sys

import pytest

from mp_agent.flight.report_page import as_html, plots_of
from tests.agent.flight.analyses import EVIL, analysis_of, exploding
from tests.agent.flight.builders import calm

LIBRARY = re.compile(r"<script>/\*! https://github.com/leeoniya/uPlot.*?</script>", re.DOTALL)


def data_of(page: str):
    (text,) = re.findall(r'<script type="application/json" id="plot-data">(.*?)</script>', page)
    return json.loads(text)


def test_the_page_loads_nothing():
    page = LIBRARY.sub("", as_html(exploding()))
    assert not re.search(r"https?:|<link|<img|<iframe|@import|url\(|\ssrc=|\shref=|\son\w+=", page)


def test_the_policy_lets_exactly_the_pages_own_scripts_run():
    page = as_html(exploding())
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    policy = policy.replace("&#39;", "'")
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == 2
    digests = {hashlib.sha256(script.encode()).digest() for script in scripts}
    allowed = set(re.findall(r"'sha256-([^']+)'", policy.split("script-src")[1].split(";")[0]))
    assert allowed == {base64.b64encode(digest).decode() for digest in digests}
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy


def test_names_are_shown_as_they_are_and_never_as_markup():
    page = as_html(exploding(run=EVIL, name=EVIL))
    assert page.count("<script") == 3 and page.count("</script>") == 3
    assert "alert(1)</script>" not in page
    assert page.count("&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;&#34;&#39;") > 3


def test_the_scripts_write_names_as_text_only():
    own = re.findall(r"<script>(.*?)</script>", as_html(exploding()), flags=re.DOTALL)[1]
    for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way_in not in own


def test_the_data_in_the_page_are_the_plots():
    analysis = exploding(run=EVIL, name=EVIL)
    plots = plots_of(analysis)
    assert plots is not None
    assert data_of(as_html(analysis)) == [json.loads(json.dumps(plots.as_json(), allow_nan=False))]


def test_every_plot_has_its_place_and_its_text():
    page = as_html(exploding())
    places = re.findall(
        r'<div class="plot" id="plot-([\w-]+)" role="img" aria-label="([^"]+)"', page
    )
    assert [name for name, _ in places] == ["loss", "grad-norm", "lanes"]
    assert dict(places)["grad-norm"] == ("Gradient norm: smallest 0.97, largest 6400, last 6400")


def test_a_clean_analysis_accuses_nothing():
    page = as_html(analysis_of(*calm(60)))
    assert "Nothing found" in page and "Likely causes" not in page and "The last steps" in page


def test_a_run_without_steps_has_no_plots():
    page = as_html(analysis_of())
    assert "was running" not in page and "<script" not in page


@pytest.mark.slow
def test_only_the_page_needs_the_template_library():
    code = (
        "import sys; import mp_agent.node.commands.flight, mp_agent.node.flight.service; "
        "sys.exit('jinja2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
