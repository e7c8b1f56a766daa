"""Rows of evaluations, of an iteration within an epoch, or of a whole epoch."""

import re
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, isnan
from statistics import median
from typing import Any

from mp_agent.backtest.log.columns import STEP, Row, number, plain

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
