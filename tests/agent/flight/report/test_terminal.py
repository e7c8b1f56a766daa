"""The analysis in a terminal."""

import io

from rich.console import Console

from mp_agent.flight.report import print_analysis
from tests.agent.flight.analyses import analysis_of, exploding
from tests.agent.flight.builders import calm


def printed(analysis) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    print_analysis(analysis, console)
    return console.export_text()


def test_a_clean_run_accuses_nothing():
    assert "Nothing found" in printed(analysis_of(*calm(60)))


def test_names_with_brackets_are_shown_as_they_are():
    text = printed(exploding(run="[bold]run[/bold]", name="layer[0]"))
    assert "[bold]run[/bold], attempt 0" in text
    assert "layer[0]" in text
