"""The part of `mp-agent compare` that compares two runs."""

from pathlib import Path

import click
from rich.console import Console

from mp_agent.compare.runs.divergence import compare_series
from mp_agent.compare.runs.document import runs_as_json
from mp_agent.compare.runs.html.page import runs_as_html
from mp_agent.compare.runs.read import read_run
from mp_agent.compare.runs.terminal import print_runs
from mp_agent.output import write_whole
from mp_agent.settings import load_settings


def compare_runs(
    first: str, second: str, *, rows: int, as_document: bool, page: Path | None
) -> None:
    """Compare two runs and show the result. Raises MpAgentError, naming the run."""
    settings, _ = load_settings()
    comparison = compare_series(read_run(first, settings), read_run(second, settings))
    if page is not None:
        write_whole(page, runs_as_html(comparison))
    if as_document:
        click.echo(runs_as_json(comparison))
    elif page is not None:
        click.echo(str(page))
    else:
        print_runs(comparison, Console(), rows=rows)
