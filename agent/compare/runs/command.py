"""The part of `mp-agent compare` that compares two runs."""

import time
from pathlib import Path

import click

from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.compare.runs.divergence import RunComparison, compare_series
from mp_agent.compare.runs.document import runs_as_json
from mp_agent.compare.runs.html.page import runs_as_html
from mp_agent.compare.runs.read import read_run
from mp_agent.compare.runs.scraped import read_scraped_run
from mp_agent.compare.runs.terminal import print_runs
from mp_agent.errors import CompareError
from mp_agent.inputs.addresses import is_address, shown_address
from mp_agent.output import Console, write_whole
from mp_agent.settings import load_settings


def compare_runs(
    first: str, second: str, *, rows: int, as_document: bool, page: Path | None
) -> None:
    """Compare two runs and show the result. Raises MpAgentError, naming the run."""
    settings, _ = load_settings()
    comparison = compare_series(read_run(first, settings), read_run(second, settings))
    _show(comparison, rows=rows, as_document=as_document, page=page)


def compare_scraped_runs(
    address: str,
    names: tuple[str, str],
    options: ReadOptions,
    *,
    rows: int,
    as_document: bool,
    page: Path | None,
) -> None:
    """Compare two runs that a Prometheus scraped. Raises CompareError, naming the run."""
    if not is_address(address):
        raise CompareError(
            f"--prometheus has value {shown_address(address)!r}; give http://host:port"
        )
    now_seconds = time.time()
    first, second = (read_scraped_run(address, name, options, now_seconds) for name in names)
    comparison = compare_series(first, second)
    _show(comparison, rows=rows, as_document=as_document, page=page)


def _show(comparison: RunComparison, *, rows: int, as_document: bool, page: Path | None) -> None:
    if page is not None:
        write_whole(page, runs_as_html(comparison))
    if as_document:
        click.echo(runs_as_json(comparison))
    elif page is not None:
        click.echo(str(page))
    else:
        print_runs(comparison, Console(), rows=rows)
