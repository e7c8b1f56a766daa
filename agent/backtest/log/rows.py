"""Rows of a log as the points of a run: of steps, of evaluations, and of epochs.

A row may be of an iteration within an epoch, or of a whole epoch.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from itertools import pairwise
from math import isfinite, isnan
from statistics import median
from typing import Any

from mp_agent.backtest.log.columns import (
    STEP,
    Row,
    choose_columns,
    number,
    parts_of_loss,
    plain,
)
from mp_agent.backtest.log.training_log import Point
from mp_agent.errors import LogError
from mp_agent.report.numbers import counted

_LOSS = "loss"
EPOCH = "epoch"
EPOCH_STEPS = "iterations in this epoch"
"""What readers call it who know it. A column of a log may have a similar name for another thing."""
_ASSUMED_STEPS = 1000
"""Of an epoch, where the log does not say."""
_SKIPPED = "skipped updates of the epoch"
_PARTS = ("mode", "split", "phase", "stage", "subset", "set")
"""Columns that say whether a row is of training."""
_EVALUATION = re.compile(r"(?:val|valid|validation|eval|evaluation|test|dev)\b", re.IGNORECASE)


def of_training(rows: Sequence[Row]) -> tuple[Sequence[Row], list[str]]:
    """Return the rows without those that say that they are of an evaluation, and a note."""
    parts = {name for _, row in rows for name in row if plain(name) in _PARTS}
    if not parts:
        return rows, []
    kept = [
        (line, row)
        for line, row in rows
        if not any(_EVALUATION.match(str(row.get(name, ""))) for name in parts)
    ]
    left_out = len(rows) - len(kept)
    return kept, [f"{left_out} rows of evaluations are left out"] if left_out else []


def with_sum_of_parts(
    rows: Sequence[Row], chosen: Mapping[str, str]
) -> tuple[Sequence[Row], list[str]]:
    """Return rows with the sum of the loss's parts, where a log holds only these, and a note."""
    names = {name: None for _, row in rows for name in row}
    parts = parts_of_loss(names)
    if not parts or _LOSS in chosen or any(plain(name) == _LOSS for name in names):
        return rows, []
    summed: list[Row] = []
    known: dict[object, dict[str, float]] = {}
    for line, row in rows:
        # TensorBoard holds each part of a step apart.
        own = known.setdefault(row.get(STEP, line), {})
        own |= {name: value for name in parts if (value := _part(row.get(name))) is not None}
        whole = len(own) == len(parts) and any(name in row for name in parts)
        summed.append((line, {**row, _LOSS: sum(own.values())} if whole else row))
    return summed, [f"the loss is taken for the sum of {', '.join(parts)}"]


def _part(value: object) -> float | None:
    try:
        return number(value)
    except ValueError:
        return None


def across_epochs(rows: Sequence[Row], columns: dict[str, str]) -> tuple[Sequence[Row], list[str]]:
    """Return rows whose step goes on over epochs, and notes.

    Where rows are of whole epochs, `columns` gets the column for the step.
    """
    by_plain = {plain(name): name for _, row in rows for name in row}
    epoch_column = by_plain.get(EPOCH)
    if epoch_column is None:
        return rows, []
    epochs = [_whole(row.get(epoch_column)) for _, row in rows]
    known = [epoch for epoch in epochs if epoch is not None]
    if STEP not in columns:
        if len(known) < max(len(rows), 2) or any(a == b for a, b in pairwise(known)):
            return rows, []
        return _epochs_as_steps(rows, columns, epoch_column)
    column = columns[STEP]
    steps = [_whole(row.get(column)) for _, row in rows]
    length = max((row.get(EPOCH_STEPS, 0) for _, row in rows), default=0) or _epoch_steps(
        [(e, s) for e, s in zip(epochs, steps, strict=True) if e is not None and s is not None]
    )
    if not length:
        return rows, []
    first = min(1, *known)
    counted = [
        (
            line,
            row
            if epoch is None or step is None
            else {**row, column: (epoch - first) * length + step},
        )
        for (line, row), epoch, step in zip(rows, epochs, steps, strict=True)
    ]
    begun = f"(epoch - {first})" if first else "epoch"
    return counted, [f"steps are {begun} × {length} + {column}, which restarts in each epoch"]


def _whole(value: object) -> int | None:
    """Return a value as a whole number; None for any other."""
    try:
        found = number(value)
    except ValueError:
        return None
    if found is None or not isfinite(found) or found != int(found):
        return None
    return int(found)


def _epoch_steps(places: Sequence[tuple[int, int]]) -> int:
    """Return the steps per epoch as the last logged ones show them; 0 where steps go on."""
    next_epochs = [pair for pair in pairwise(places) if pair[1][0] > pair[0][0]]
    if not next_epochs or any(after[1] > before[1] for before, after in next_epochs):
        return 0
    gaps = [b[1] - a[1] for a, b in pairwise(places) if a[0] == b[0] and b[1] > a[1]]
    interval = int(median(gaps)) if gaps else 1
    last = max(step for _, step in places)
    # Counted from 1, the last iteration is the length; from 0, it is followed by others.
    return last if min(step for _, step in places) >= interval else last + interval


def _epochs_as_steps(
    rows: Sequence[Row], columns: dict[str, str], epoch_column: str
) -> tuple[Sequence[Row], list[str]]:
    """Return rows of whole epochs, each with its last step.

    They hold means: one update among thousands that is not finite makes the mean norm NaN. Such a
    row has no norm then, and with a loss scale one skipped step.
    """
    columns[STEP], columns["skipped_since"] = epoch_column, _SKIPPED
    norm, loss, scale = (columns.get(name) for name in ("grad_norm", "loss", "loss_scale"))
    kept: list[Row] = []
    unknown = 0
    for line, row in rows:
        changes: dict[str, Any] = {epoch_column: (_whole(row[epoch_column]) or 0) * _ASSUMED_STEPS}
        if norm and loss and _is_nan(row.get(norm)) and _trained(row.get(loss)):
            unknown += 1
            changes |= {norm: None, _SKIPPED: 1 if scale and row.get(scale) else None}
        kept.append((line, {**row, **changes}))
    notes = [f"no column for the step: each epoch is taken for {_ASSUMED_STEPS} steps"]
    if unknown:
        notes.append(
            f"{unknown} epochs have a NaN gradient norm and a finite loss: at least one of "
            "their updates was not finite, and the log does not say how many; they count as one "
            "each, and as without a norm"
        )
    return kept, notes


def _is_nan(value: object) -> bool:
    try:
        found = number(value)
    except ValueError:
        return False
    return found is not None and isnan(found)


def _trained(value: object) -> bool:
    """Return whether a loss is finite and not 0, as which some trainers log NaN."""
    try:
        found = number(value)
    except ValueError:
        return False
    return found is not None and isfinite(found) and found != 0.0


NOTES_PER_LOG = 5
"""Problems that are reported one by one; of the others only how many."""
_STEP_MAX = 2**53
_EMPTY_AT_LEAST = 8
"""Rows without a loss at the end of a log that are worth a word."""
_BACK_MAX = 0.1
"""Of the rows, with a step below that of the row before."""
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
        if not self.more:
            return self.notes
        verb = "is" if self.more == 1 else "are"
        return [*self.notes, f"{counted(self.more, f'more {self.unit}')} {verb} left out"]


def points_of_rows(
    rows: Sequence[Row], chosen: Mapping[str, str], problems: Problems
) -> tuple[tuple[Point, ...], list[str]]:
    """Return the points of rows, in their order, and notes on what was left out or assumed.

    Rows of the same step that follow each other become one point. Raises LogError where no column
    holds a number to judge.
    """
    rows, notes = of_training(rows)
    rows, about_parts = with_sum_of_parts(rows, chosen)
    columns = choose_columns((name for _, row in rows for name in row), chosen)
    rows, about_epochs = across_epochs(rows, columns)
    rows, about_order = _oldest_first(rows, columns)
    about_order += _without_false_step(rows, columns, chosen)
    notes += about_parts + about_epochs + about_order
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
    about = (*_about_rounding(rows, columns), *_about_empty_end(rows, columns))
    return tuple(points), [*notes, *about, *problems.messages()]


def _oldest_first(
    rows: Sequence[Row], columns: Mapping[str, str]
) -> tuple[Sequence[Row], list[str]]:
    """Return rows from the first step on: some logs begin with the newest."""
    column = columns.get(STEP, "")
    steps = [step for _, row in rows if (step := _whole(row.get(column))) is not None]
    if len(set(steps)) < 3 or any(after > before for before, after in pairwise(steps)):
        return rows, []
    return rows[::-1], [f"{column} goes down from row to row: the log is read from its end"]


def _without_false_step(
    rows: Sequence[Row], columns: dict[str, str], chosen: Mapping[str, str]
) -> list[str]:
    """Take the column for the step away where it counts something else, such as an episode's steps.

    Steps of a run go back where it resumes, which is not at every tenth row.
    """
    if STEP not in columns or STEP in chosen:
        return []
    column = columns[STEP]
    steps = [step for _, row in rows if (step := _whole(row.get(column))) is not None]
    back = sum(after < before for before, after in pairwise(steps))
    if back <= max(len(steps) * _BACK_MAX, 2):
        return []
    del columns[STEP]
    return [f"{column} goes back {back} times in {len(steps)} rows, so it is not the run's step"]


def _about_rounding(rows: Sequence[Row], columns: Mapping[str, str]) -> Iterator[str]:
    for column in (columns[name] for name in _ROUNDED if name in columns):
        zeros = [row[column] for _, row in rows if _rounded_to_zero(row.get(column))]
        if zeros:
            yield (
                f"{column} is written as {zeros[0].strip()} in {len(zeros)} rows: less than the "
                "decimals show, and taken as not logged there"
            )


def _about_empty_end(rows: Sequence[Row], columns: Mapping[str, str]) -> Iterator[str]:
    """Report where the losses end before the log, with longer gaps than any before."""
    column = columns.get(_LOSS, _LOSS)
    cells = [row[column] for _, row in rows if column in row]
    held = [place for place, cell in enumerate(cells) if _part(cell) is not None]
    end = len(cells) - 1 - held[-1] if held else 0
    gap = max((after - before for before, after in pairwise(held)), default=len(cells))
    if end >= max(_EMPTY_AT_LEAST, 2 * gap):
        yield (
            f"{column} is empty in the last {end} rows: pandas and JavaScript write NaN so, "
            "and the run may have broken there"
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
