"""Rows of one family of columns become one, on the device on which they are."""

from collections.abc import Sequence
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
    for place, column in enumerate(family.columns):
        values_K, absent_K = rows_KC[:, place], absent_KC[:, place]
        if column.algebra is Algebra.SUM:
            value = values_K.masked_fill(absent_K, 0.0).sum()
            value = value.clamp(-float_info.max, float_info.max)
        elif column.algebra is Algebra.MAX:
            value = values_K.masked_fill(absent_K, -torch.inf).amax()
        else:
            value = values_K.masked_fill(absent_K, torch.inf).amin()
        found.append(value.masked_fill(absent_K.all(), nan))
    return torch.stack(found)


def bounded(value: float) -> float:
    """Return a sum of finite numbers, at most float64's largest magnitude."""
    return min(max(value, -float_info.max), float_info.max)
