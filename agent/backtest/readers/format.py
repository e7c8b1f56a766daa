"""What a format is: how to recognise it, and how to read it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from mp_agent.backtest.log.columns import Row
from mp_agent.backtest.log.rows import Problems, points_of_rows
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.errors import LogError

_Row = TypeVar("_Row", bound=Row)

HEAD_BYTES = 65_536
"""How much of a file is looked at to recognise its format."""
NOTEBOOK = ".ipynb"
"""Suffix of the files that are read for what their cells have printed."""
ROWS_MAX = 5_000_000
"""Each takes some 300 bytes of memory."""


@dataclass(frozen=True, slots=True)
class LogFormat:
    """One format. `recognises` gets a path and the first bytes of a file (none of a directory).

    `read` returns the runs at a path, and raises LogError, naming what is wrong, where there are
    none.
    """

    name: str
    recognises: Callable[[Path, bytes], bool]
    read: Callable[[Path, ReadOptions], Sequence[TrainingLog]]


def log_of_rows(
    path: Path,
    format_name: str,
    rows: Sequence[Row],
    options: ReadOptions,
    *,
    name: str = "",
    problems: Problems | None = None,
    notes: Iterable[str] = (),
    **facts: Any,
) -> TrainingLog:
    """Return a log that consists of rows. Raises LogError without a number to judge."""
    problems = problems or Problems()
    points, found = points_of_rows(rows, options.columns, problems)
    log = TrainingLog(
        name=name or run_name(path),
        source=str(path),
        format=format_name,
        points=points,
        notes=(*found, *notes),
    )
    return replace(log, **facts)


def run_name(path: Path) -> str:
    """Return what a run is called whose log lies at a path: of a common file, its directory."""
    stem = path.name.removesuffix(path.suffix)
    common = stem in ("trainer_state", "log", "train", "history", "metrics", "output", "stdout")
    parent = path.resolve().parent.name
    return parent if common and parent else stem or path.name


def bounded_rows(rows: Iterable[_Row]) -> list[_Row]:
    """Return rows as a list. Raises LogError for more than fit into memory."""
    kept = list(islice(rows, ROWS_MAX + 1))
    if len(kept) > ROWS_MAX:
        raise LogError(f"holds more than {ROWS_MAX} rows")
    return kept
