"""`mp-agent backtest`: what would have fired on past runs, and when."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mp_agent.backtest.options import log_options, past_runs, values_of
from mp_agent.backtest.report import (
    as_html,
    as_json,
    print_backtest,
    print_differences,
    print_failures,
)
from mp_agent.backtest.results import SEVERITIES, Difference, Failure, RunResult, differences
from mp_agent.output import WRONG_USE, Console, write_whole
from mp_agent.report.options import json_option, page_option, wide_console

_LOG_FAILED = 1
_ALERTED = 3


@click.command(
    "backtest",
    epilog="Exit status: 0 all logs were read, 1 some could not be read (the others were judged), "
    "2 wrong use or nothing to judge, 3 an alert as severe as --fail-on.",
)
@log_options
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Change a threshold, a duration or a severity, as for `mp-agent rules`; repeatable.",
)
@click.option(
    "--compare",
    "compared",
    multiple=True,
    metavar="NAME=VALUE",
    help="Judge a second time with this changed too, and show what differs; repeatable.",
)
@json_option("result")
@page_option("result", "curves")
@click.option("--details", is_flag=True, help="Print notes and blind conditions of every run.")
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    help="Exit with 3 when a run brings an alert that is as severe.",
)
def backtest_command(
    logs: tuple[str, ...],
    assignments: tuple[str, ...],
    compared: tuple[str, ...],
    as_document: bool,
    page: Path | None,
    details: bool,
    fail_on: str | None,
    **reading: Any,
) -> None:
    """Judge past runs from their logs: which alerts, since which step, for how long.

    LOG is a file or directory: trainer_state.json of Transformers, CSV, JSON, JSON lines,
    TensorBoard events, a .wandb file, a run of MLflow or its database, output of Megatron,
    DeepSpeed or fairseq, the console of Transformers, torchtitan, nanoGPT, icefall or any trainer
    that prints names and values, a flight record; or the address of a Prometheus. Of a directory
    that holds several logs, all are judged.
    """
    values = [values_of(assignments)]
    if compared:
        values.append(values_of((*assignments, *compared)))
    past = past_runs("backtest", logs, values, outputs=(page,), **reading)
    runs, failures = past.judge()
    first = [run[0] for run in runs]
    found = list(differences(first, [run[1] for run in runs])) if compared else None
    if page is not None and first:
        write_whole(page, as_html(first, failures, settings=assignments))
    if as_document:
        click.echo(as_json(first, failures, settings=assignments, compared=compared, found=found))
    else:
        _print(first, failures, found, details=details, page=page)
    sys.exit(_status(first, failures, fail_on))


def _print(
    runs: Sequence[RunResult],
    failures: Sequence[Failure],
    found: Sequence[Difference] | None,
    *,
    details: bool,
    page: Path | None,
) -> None:
    console = wide_console()
    print_failures(failures, Console(stderr=True, soft_wrap=True))
    if found is not None:
        print_differences(found, len(runs), console)
    else:
        print_backtest(runs, console, details=details)
    if page is not None and runs:
        console.print(str(page))


def _status(runs: Sequence[RunResult], failures: Sequence[Failure], fail_on: str | None) -> int:
    if not runs:
        return WRONG_USE
    if fail_on and any(
        run.worst and SEVERITIES.index(run.worst) <= SEVERITIES.index(fail_on) for run in runs
    ):
        return _ALERTED
    return _LOG_FAILED if failures else 0
