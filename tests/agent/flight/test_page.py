"""The page and the document: whole, self-contained, and safe against what names may hold."""

import io
import json
import re
from dataclasses import replace
from math import isfinite
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from mp_agent.flight.analysis import analyse, remedies_for
from mp_agent.flight.diagnosis import Causes
from mp_agent.flight.document import as_dict, as_json
from mp_agent.flight.evidence import Evidence
from mp_agent.flight.history import RunHistory
from mp_agent.flight.page import as_html
from mp_agent.flight.svg import LINEAR, LOG2, LOG10, Line, Point, Span, chart
from mp_agent.flight.terminal import print_analysis
from tests.agent.flight.builders import calm, layers, make_log, make_segment, overflow
from tests.agent.node.builders import merged_step
from tests.agent.records.samples import make_condition

EVIL = "<script>alert(1)</script>&\"'"


def analysis_of(*steps, tables=(), run="llama", name="weight"):
    table = layers(63, {name: {"sum_squares": 4.0, "elements": 9.0}, "b": {"nan_elements": 1.0}})
    condition = make_condition(run=run, description=name)
    evidence = Evidence(
        source=Path(f"/records/{run}"),
        ranks=(make_log(segments=(make_segment(),), run=run, host=name),),
        read_unix_seconds=0.0,
        reasons=(run,),
        conditions=(condition,),
        notes=(name,),
    )
    return analyse(evidence, RunHistory(steps=steps, tables=tables or (table,)))


def exploding(**names: str):
    growing = [merged_step(61 + i, norm=50.0 * 2.0**i, loss=2.0 + i) for i in range(8)]
    return analysis_of(*calm(60), *growing, **names)


def test_the_page_loads_nothing_and_runs_nothing():
    page = as_html(exploding())
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(|\son\w+=", page)


def test_names_are_shown_as_they_are_and_never_as_markup():
    page = as_html(exploding(run=EVIL, name=EVIL))
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;") > 3


def test_every_plot_is_well_formed_and_holds_finite_numbers_alone():
    steps = [*calm(60, loss_scale=65536.0), *[overflow(61 + n, 2.0 ** (16 - n)) for n in range(20)]]
    page = as_html(analysis_of(*steps))
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(plots) == 5
    for plot in plots:
        for element in ElementTree.fromstring(plot).iter():
            for attribute in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
                assert isfinite(float(element.get(attribute, 0)))
            assert "nan" not in element.get("points", "")


@pytest.mark.parametrize("axis", [LINEAR, LOG10, LOG2])
@pytest.mark.parametrize(
    "values", [[], [None], [0.0], [5.0], [1e-300, 1e300], [3.0, 3.0], [None, 1.0, None], [-1.0]]
)
def test_a_chart_can_be_drawn_of_any_values(axis, values):
    points = [Point(n, value) for n, value in enumerate(values)]
    plot = chart(Span(0, max(len(values) - 1, 0), None, int), points, axis, title="t")
    ElementTree.fromstring(plot)
    assert "nan" not in plot and "inf" not in plot


def test_a_limit_far_from_the_values_is_left_out():
    def drawn(value: float) -> str:
        points = [Point(n, 1.0 + n) for n in range(3)]
        span = Span(0, 2, None, int)
        return chart(span, points, LOG10, title="t", lines=[Line(value, "limit")])

    assert "limit" in drawn(10.0)
    assert "limit" not in drawn(1e9)


def test_a_line_does_not_cross_steps_without_a_value():
    points = [Point(1, 1.0), Point(2, 2.0), Point(3, None), Point(4, 2.0), Point(5, 1.0)]
    plot = chart(Span(1, 5, None, int), points, LINEAR, title="t")
    assert plot.count("<polyline") == 2


def test_the_document_is_json_that_any_reader_takes():
    analysis = exploding(run=EVIL)
    steps = (*analysis.history.steps, merged_step(99, loss_scale=0.0, abs_max=0.0))
    analysis = replace(analysis, history=replace(analysis.history, steps=steps))
    document = json.loads(as_json(analysis), parse_constant=pytest.fail)
    assert (document["format"], document["version"]) == ("mp_agent postmortem", 1)
    assert document["first_bad"]["cause"] == "gradient_explosion"
    assert document["first_bad"]["step"] == 63
    assert document["findings"][0]["likelihood"] == "likely"


def test_the_keys_of_the_document_stay():
    document = as_dict(exploding())
    assert set(document) == set(
        "format version source reasons run first_bad findings remedies moves steps layers ranks "
        "conditions not_measured notes".split()
    )
    assert set(document["findings"][0]) == set(
        "cause title likelihood score follows step sequence rank layer phase for against".split()
    )
    assert set(document["first_bad"]) == set("step sequence rank layer phase cause".split())


def test_a_clean_story_accuses_nobody_anywhere():
    analysis = analysis_of(*calm(60))
    assert as_dict(analysis)["first_bad"] is None
    assert "Nothing found" in as_html(analysis)
    console = Console(width=100, record=True, file=io.StringIO())
    print_analysis(analysis, console)
    assert "Nothing found" in console.export_text()


def test_the_terminal_shows_names_with_brackets_as_they_are():
    console = Console(width=200, record=True, file=io.StringIO())
    print_analysis(exploding(run="[bold]run[/bold]", name="layer[0]"), console)
    text = console.export_text()
    assert "[bold]run[/bold], attempt 0" in text
    assert "layer[0]" in text


def test_a_story_without_steps_can_be_told():
    analysis = analysis_of()
    assert "was running" not in as_html(analysis)
    json.loads(as_json(analysis))


@pytest.mark.parametrize("cause", Causes)
def test_every_cause_has_remedies_in_the_catalog(cause):
    assert remedies_for(cause.value)
