"""Rows of a log as the points of a run."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from math import isfinite
from typing import Any

from mp_agent.backtest.log.columns import STEP, Row, choose_columns, number, plain
from mp_agent.backtest.log.epochs import across_epochs, of_training
from mp_agent.backtest.log.training_log import Point
from mp_agent.errors import LogError

NOTES_PER_LOG = 5
"""Problems that are reported one by one; of the others only how many."""
_STEP_MAX = 2**53
_ROUNDED = ("grad_norm", "learning_rate")
"""What may be far below the decimals that a log shows, without being zero."""
_ROUNDED_ZERO = re.compile(r"\s*0\.0{2,}\s*")
_ELAPSED = re.compile(
    r"(?:(?P<days>\d+) days?, )?(?P<hours>\d+):(?P<minutes>\d\d):(?P<seconds>\d\d)"
)
_LOG2_MAX = 1000
"""Beyond it a power of two is no float."""


@dataclass(slots=True)
class Problems:
    """Collects what is wrong with lines of a log, each named, the many counted."""

    unit: str = "line"
    notes: list[str] = field(default_factory=list)
    more: int = 0

    def add(self, line: int, text: str) -> None:
        """Note a problem of a line."""
        if len(self.notes) < NOTES_PER_LOG:
            self.notes.append(f"{self.unit} {line}: {text}; it is left out")
        else:
            self.more += 1

    def messages(self) -> list[str]:
        """Return the notes."""
        return [
            *self.notes,
            *([f"{self.more} more {self.unit}s are left out"] if self.more else []),
        ]


def points_of_rows(
    rows: Sequence[Row], chosen: Mapping[str, str], problems: Problems
) -> tuple[tuple[Point, ...], list[str]]:
    """Return the points of rows, in their order, and notes on what was left out or assumed.

    Rows of the same step that follow each other become one point. Raises LogError where no column
    holds a number to judge.
    """
    rows, notes = of_training(rows)
    columns = choose_columns((name for _, row in rows for name in row), chosen)
    rows, about_epochs = across_epochs(rows, columns)
    notes += about_epochs
    if STEP not in columns:
        notes.append("no column for the step: rows are counted as steps, from 1")
    points: list[Point] = []
    repeated = 0
    skipped_before: float | None = None
    for index, (line, row) in enumerate(rows, start=1):
        try:
            values = _values(row, columns)
            step = _step(row, columns, index)
        except ValueError as error:
            problems.add(line, str(error))
            continue
        if step is None or not values.keys() - {"time", "step_seconds"}:
            continue
        point = _point(step, values)
        cumulative = values.get("skipped_cumulative")
        if cumulative is not None and isfinite(cumulative):
            if skipped_before is not None and cumulative > skipped_before:
                point = replace(point, skipped_steps=int(cumulative - skipped_before))
            skipped_before = cumulative
        # A skipped step that has a row of its own is another step than the one that was logged.
        apart = points and (points[-1].skipped or point.skipped) and point.loss is None
        if points and points[-1].step == step and not apart:
            points[-1], overlap = _joined(points[-1], point)
            repeated += overlap
        else:
            points.append(point)
    if repeated:
        notes.append(f"{repeated} steps were logged more than once; the last row counts")
    if not points:
        raise LogError("; ".join(problems.messages()) or "no row holds a number to judge")
    if len(points) == 1 and repeated > 1:
        raise LogError(f"all rows hold step {points[0].step}: a row per run is no log of one")
    return tuple(points), [*notes, *_about_rounding(rows, columns), *problems.messages()]


def _about_rounding(rows: Sequence[Row], columns: Mapping[str, str]) -> Iterator[str]:
    for column in (columns[name] for name in _ROUNDED if name in columns):
        zeros = [row[column] for _, row in rows if _rounded_to_zero(row.get(column))]
        if zeros:
            yield (
                f"{column} is written as {zeros[0].strip()} in {len(zeros)} rows: less than the "
                "decimals show, and taken as not logged there"
            )


def _rounded_to_zero(value: object) -> bool:
    return isinstance(value, str) and _ROUNDED_ZERO.fullmatch(value) is not None


def _step(row: Mapping[str, Any], columns: Mapping[str, str], index: int) -> int | None:
    if STEP not in columns:
        return index
    column = columns[STEP]
    if isinstance(of_total := row.get(column), str):  # `10/500` in ms-swift's logs
        row = {column: of_total.partition("/")[0]}
    value = _number(row, column)
    if value is None:
        return None
    if not 0 <= value <= _STEP_MAX:
        shown = _shown(row[column])
        raise ValueError(f"{column} has value {shown}; a step is from 0 to {_STEP_MAX}")
    return int(value)


def _values(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, float]:
    values = {}
    for quantity, column in columns.items():
        if quantity == STEP or (quantity in _ROUNDED and _rounded_to_zero(row.get(column))):
            continue
        value = _time(row, column) if quantity == "time" else _number(row, column)
        if value is not None:
            values[quantity] = value
    return values


def _number(row: Mapping[str, Any], column: str) -> float | None:
    try:
        return number(row.get(column))
    except ValueError:
        raise ValueError(f"{column} has value {_shown(row[column])}, which is no number") from None


def _time(row: Mapping[str, Any], column: str) -> float | None:
    value = row.get(column)
    if plain(column) == "elapsed_time":
        # As a number it may be that of each step.
        found = _ELAPSED.fullmatch(str(value))
        parts = found.groupdict("0") if found else {}
        return timedelta(**{unit: int(n) for unit, n in parts.items()}).total_seconds() or None
    try:
        seconds = number(value)
    except ValueError:
        try:
            return datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError, OSError):
            text = f"{column} has value {_shown(value)}, which is no time"
            raise ValueError(text) from None
    return seconds if seconds is not None and isfinite(seconds) else None


def _point(step: int, values: Mapping[str, float]) -> Point:
    skipped, step_seconds = values.get("skipped"), values.get("step_seconds")
    since = values.get("skipped_since")
    rate, scale = values.get("learning_rate"), values.get("loss_scale")
    log2 = values.get("loss_scale_log2")
    if scale is None and log2 is not None and abs(log2) < _LOG2_MAX:
        scale = 2.0**log2
    return Point(
        step=step,
        time_seconds=values.get("time"),
        step_seconds=_finite(step_seconds) if step_seconds and step_seconds > 0 else None,
        loss=values.get("loss"),
        grad_norm=values.get("grad_norm"),
        learning_rate=_finite(rate),
        loss_scale=_finite(scale),
        skipped=None if skipped is None else skipped > 0,
        skipped_steps=int(since) if since is not None and 0 < since < _STEP_MAX else 0,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _joined(before: Point, after: Point) -> tuple[Point, bool]:
    """Return two points of one step as one, and whether both held the same quantity."""
    changes = {
        one.name: value
        for one in fields(Point)
        if (value := getattr(after, one.name)) is not None and one.name != "skipped_steps"
    }
    overlap = any(
        getattr(before, name) is not None and getattr(before, name) != value
        for name, value in changes.items()
        if name in ("loss", "grad_norm", "loss_scale")
    )
    skipped_steps = before.skipped_steps + after.skipped_steps
    return replace(before, **changes, skipped_steps=skipped_steps), overlap


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def rows_of_columns(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Return columns of equal length as rows."""
    names = list(columns)
    return [
        (index, dict(zip(names, values, strict=True)))
        for index, values in enumerate(zip(*columns.values(), strict=True), start=1)
    ]


def numbered(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return rows with their numbers, from 1."""
    return list(enumerate(rows, start=1))
