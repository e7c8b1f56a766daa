"""What `mp-agent backtest` and `mp-agent tune` have in common."""

import re
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.progress import Progress

from mp_agent.alerting.duration_text import parse_seconds
from mp_agent.alerting.site import site_values
from mp_agent.alerting.values import Values
from mp_agent.backtest.log.columns import QUANTITIES
from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.backtest.many import Job, Judged, judge_all
from mp_agent.backtest.readers.find import Source, format_names
from mp_agent.errors import SettingError
from mp_agent.output import Console
from mp_agent.settings import load_settings

_Command = TypeVar("_Command", bound=Callable[..., Any])
_BAR_LOGS_MIN = 5
_DAYS = re.compile(r"(\d+(?:\.\d+)?)d")
_DAY_SECONDS = 86_400.0


def log_options(command: _Command) -> _Command:
    """Add the options that say how logs are read."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


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


def judge_with_bar(
    sources: list[Source], job: Job, *, processes: int | None, what: str
) -> list[Judged]:
    """Judge all sources; with many of them, a bar on standard error says how far that is."""
    console = Console(stderr=True)
    shown = len(sources) >= _BAR_LOGS_MIN and console.is_terminal
    with Progress(console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(what, total=len(sources))
        return judge_all(sources, job, processes=processes, progress=lambda: bar.advance(task))


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
        type=click.FloatRange(min=0.0, min_open=True, max=1e6),
        default=None,
        help="Time per step; by default that of the log, else 1. Windows and delays of the "
        "conditions count in this time.",
    ),
    click.option(
        "--labels",
        "labels_path",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        help="File that says which runs are healthy, wrong or unclear: a YAML or JSON mapping "
        "from names to labels, or CSV lines run,label.",
    ),
    click.option("--run", default="", help="Of a Prometheus: the run; all by default."),
    click.option(
        "--start",
        default="",
        help="Of a Prometheus: begin of the range, as 2026-01-31T10:00, Unix seconds, or 6h for "
        "six hours ago; a day before its end by default.",
    ),
    click.option("--end", default="", help="Of a Prometheus: end of the range; now by default."),
    click.option(
        "--scrape-interval",
        default="15s",
        show_default=True,
        help="Of a Prometheus: time between two scrapes.",
    ),
    click.option(
        "--processes",
        type=click.IntRange(min=1, max=256),
        default=None,
        help="Logs that are judged at the same time; as many as there are processors by default.",
    ),
)
