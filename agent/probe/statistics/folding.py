"""Rows of one family of columns become one, on the device on which they are."""

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from math import nan
from sys import float_info

import torch

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns import ColumnFamily


def folded(family: ColumnFamily, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows [C] of a family as one, by the algebra of each column; NaN is absent."""
    if len(rows) == 1:
        return rows[0]
    rows_KC = torch.stack(list(rows))
    absent_KC = rows_KC.isnan()
    found = []
    for part, algebra in stretches_of(family):
        values_KP = rows_KC[:, part].masked_fill(absent_KC[:, part], algebra.identity)
        if algebra is Algebra.SUM:
            found.append(values_KP.sum(0).clamp(-float_info.max, float_info.max))
        elif algebra is Algebra.MAX:
            found.append(values_KP.amax(0))
        else:
            found.append(values_KP.amin(0))
    return torch.cat(found).masked_fill_(absent_KC.all(0), nan)


ROWS_AT_MOST = 64
"""Of one layer, before they become one: a step may call a layer any number of times."""


def keep_row(family: ColumnFamily, rows: list[torch.Tensor], row: torch.Tensor) -> None:
    """Add a row to those of a layer, of which there are never more than `ROWS_AT_MOST`."""
    if len(rows) == ROWS_AT_MOST:
        rows[:] = [folded(family, rows)]
    rows.append(row)


@cache
def stretches_of(family: ColumnFamily) -> tuple[tuple[slice, Algebra], ...]:
    """Return the runs of neighbouring columns of one algebra."""
    found, start = [], 0
    for algebra, columns in groupby(column.algebra for column in family.columns):
        end = start + sum(1 for _ in columns)
        found.append((slice(start, end), algebra))
        start = end
    return tuple(found)


def bounded(value: float) -> float:
    """Return a sum of finite numbers, at most float64's largest magnitude."""
    return min(max(value, -float_info.max), float_info.max)
