"""Options of the commands that read past runs."""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from mp_agent.alerting.durations import parse_seconds
from mp_agent.alerting.site import site_values
from mp_agent.alerting.values import Values
from mp_agent.backtest.log.columns import QUANTITIES
from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.backtest.past_runs import Job, PastRuns, read_labels
from mp_agent.backtest.readers.find import expand, format_names
from mp_agent.errors import LogError, SettingError
from mp_agent.output import keep_inputs, refuse
from mp_agent.report.options import FiniteRange, Option, file_option
from mp_agent.settings import load_settings

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DAYS = re.compile(r"(\d+(?:\.\d+)?)d")
_DAY_SECONDS = 86_400.0


def log_options(command: _Command) -> _Command:
    """Add the options that say how logs are read."""
    return _with_options(_OPTIONS, command)


def read_options(
    log_format: str,
    columns: Iterable[str],
    run: str,
    start: str,
    end: str,
    scrape_interval: str,
    *,
    every_series: bool = False,
) -> ReadOptions:
    """Return the options by which logs are read. Raises click.UsageError, naming the culprit."""
    return ReadOptions(
        format=log_format,
        columns=dict(_column(text) for text in columns),
        run=run,
        **_period(start, end, scrape_interval),
        every_series=every_series,
    )


def period_options(start: str, end: str, scrape_interval: str) -> ReadOptions:
    """Return the options by which a Prometheus is read. Raises click.UsageError."""
    return ReadOptions(**_period(start, end, scrape_interval))


def _period(start: str, end: str, scrape_interval: str) -> dict[str, Any]:
    return {
        "start_unix_seconds": _time("--start", start),
        "end_unix_seconds": _time("--end", end),
        "scrape_seconds": _seconds("--scrape-interval", scrape_interval),
    }


def values_of(assignments: Iterable[str]) -> Values:
    """Return what is in force with `--set`, as for `mp-agent rules`. Raises click.UsageError.

    The setting `time_scale` counts as it does for a node agent.
    """
    try:
        settings, _ = load_settings(refuse=("thresholds", "alerts"))
        return site_values(settings, assignments, time_scale=settings.time_scale)
    except SettingError as error:
        raise click.UsageError(str(error)) from error


def past_runs(
    command: str,
    logs: Sequence[str],
    values: Sequence[Values],
    *,
    outputs: Sequence[Path | None],
    step_seconds: float | None,
    labels_path: Path | None,
    processes: int | None,
    **reading: Any,
) -> PastRuns:
    """Return what `log_options` name; exits where a log or the labels are not there.

    outputs: what is to be written, which may be none of them.
    """
    try:
        sources = list(expand(logs))
        keep_inputs((labels_path, *(source.address for source in sources)), *outputs)
        labels = read_labels(labels_path) if labels_path else {}
    except (LogError, OSError) as error:
        refuse(command, str(error))
    options = read_options(**{**reading, "log_format": reading["log_format"] or ""})
    job = Job(options=options, values=values, step_seconds=step_seconds)
    return PastRuns(sources=sources, job=job, labels=labels, processes=processes)


def _column(text: str) -> tuple[str, str]:
    quantity, equals, column = (part.strip() for part in text.partition("="))
    if not equals or not column:
        raise click.UsageError(f"--column has value {text!r}; write QUANTITY=NAME")
    if quantity not in QUANTITIES:
        raise click.UsageError(
            f"--column has quantity {quantity!r}; known: {', '.join(QUANTITIES)}"
        )
    return quantity, column


def _time(option: str, text: str) -> float | None:
    """Return a time as Unix seconds: of ISO 8601, Unix seconds, or a duration before now."""
    if not text:
        return None
    try:
        if text.replace(".", "", 1).isdigit() and len(text) >= 9:
            return float(text)
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        pass
    days = _DAYS.fullmatch(text)
    try:
        seconds = float(days[1]) * _DAY_SECONDS if days else parse_seconds(option, text)
    except SettingError:
        raise click.UsageError(
            f"{option} has value {text!r}; give 2026-01-31T10:00, Unix seconds, or 6h or 2d for "
            "six hours or two days ago"
        ) from None
    return time.time() - seconds


def _seconds(option: str, text: str) -> float:
    try:
        seconds = parse_seconds(option, text)
    except SettingError as error:
        raise click.UsageError(str(error)) from error
    if not seconds:
        raise click.UsageError(f"{option} has value {text!r}; it must be above 0")
    return seconds


def period_of_prometheus(start: str = "", between: str = "scrapes") -> Option:
    """Return the options that say which part of a Prometheus is read, and how densely.

    start: where it begins by default; a day before its end without one.
    """
    by_default = "" if start else "; a day before its end by default"
    options = (
        click.option(
            "--start",
            default=start,
            show_default=bool(start),
            help="Of a Prometheus: begin of the range, as 2026-01-31T10:00, Unix seconds, or 6h "
            f"for six hours ago{by_default}.",
        ),
        click.option(
            "--end", default="", help="Of a Prometheus: end of the range; now by default."
        ),
        click.option(
            "--scrape-interval",
            default="15s",
            show_default=True,
            help=f"Of a Prometheus: time between two {between}.",
        ),
    )
    return partial(_with_options, options)


def _with_options(options: Sequence[Option], command: _Command) -> _Command:
    for option in reversed(options):
        command = option(command)
    return command


run_of_prometheus = click.option(
    "--run", default="", help="Of a Prometheus: the run; all by default."
)

_OPTIONS = (
    click.argument("logs", nargs=-1, required=True, metavar="LOG…"),
    click.option(
        "--format",
        "log_format",
        type=click.Choice(format_names()),
        default=None,
        help="Format of the logs; by default each is recognised.",
    ),
    click.option(
        "--column",
        "columns",
        multiple=True,
        metavar="QUANTITY=NAME",
        help="The column of a table that holds a quantity, such as loss=train/ce; repeatable. "
        f"Quantities: {', '.join(QUANTITIES)}.",
    ),
    click.option(
        "--step-seconds",
        type=FiniteRange(min=0.0, min_open=True, max=1e6),
        default=None,
        help="Time per step; by default that of the log, else 1. Windows and delays of the "
        "conditions count in this time.",
    ),
    file_option(
        "--labels",
        "labels_path",
        exists=True,
        help="File that says which runs are healthy, wrong or unclear: a YAML or JSON mapping "
        "from names to labels, or CSV lines run,label.",
    ),
    run_of_prometheus,
    period_of_prometheus(),
    click.option(
        "--processes",
        type=click.IntRange(min=1, max=256),
        default=None,
        help="Logs that are judged at the same time; as many as there are processors by default.",
    ),
)
