"""From a kernel's results by name to a table of columns: the only place that knows their order."""

from collections.abc import Callable, Mapping
from math import nan
from sys import float_info
from typing import TypeVar

import numpy as np
import torch

from mp_agent.probe.statistics.pieces import stretches_of
from mp_agent.records.algebra import Algebra, FloatArray
from mp_agent.records.columns import (
    GRADIENT_COLUMNS,
    GRADIENTS,
    ColumnFamily,
    Tier,
    Unscaling,
)

Value = TypeVar("Value", FloatArray, torch.Tensor)


def wanted_columns(*, layers: bool) -> frozenset[str]:
    """Return the names of the columns to measure, of layers or of a step's totals.

    A kernel may leave out the others; their values are absent either way.
    """
    return frozenset(
        column.name for column in GRADIENT_COLUMNS if layers or column.tier is Tier.EVERY_STEP
    )


def in_order(
    results: Mapping[str, Value],
    wanted: frozenset[str],
    inverse_scale: Value | float,
    bounded: Callable[[Value], Value],
) -> list[Value]:
    """Return the columns of unscaled gradients, in the order of `GRADIENT_COLUMNS`.

    results: by column name, of the gradients as they are; NaN where there is none.
    bounded: limits a value to at most the largest float64.
    """
    columns = []
    for column in GRADIENT_COLUMNS:
        if column.name not in wanted:
            columns.append(results["elements"] * nan)
            continue
        value = results[column.name]
        for _ in range(column.unscaling.value):
            value = value * inverse_scale
        columns.append(value if column.unscaling is Unscaling.NONE else bounded(value))
    return columns


def bounded_array(values: FloatArray) -> FloatArray:
    """Return numbers, the largest float64 in place of those beyond it; NaN stays."""
    return np.minimum(values, float_info.max)


def bounded_tensor(values: torch.Tensor) -> torch.Tensor:
    """Return numbers, the largest float64 in place of those beyond it; NaN stays."""
    return values.clamp(max=float_info.max)


def folded_rows(rows_NC: torch.Tensor, family: ColumnFamily = GRADIENTS) -> torch.Tensor:
    """Return [C]: N rows as one, in a fixed order, with no constant to send to the device.

    What is of layers alone is absent.
    """
    total_T = torch.cat(
        [_FOLDS[algebra](rows_NC[:, part]) for part, algebra in stretches_of(family)]
    )
    total_T.masked_fill_(rows_NC[:, : family.totals].isnan().all(dim=0), nan)
    of_layers = rows_NC.shape[1] - family.totals
    return torch.nn.functional.pad(total_T, (0, of_layers), value=nan) if of_layers else total_T


_FOLDS: Mapping[Algebra, Callable[[torch.Tensor], torch.Tensor]] = {
    Algebra.SUM: lambda values_NC: values_NC.nansum(dim=0),
    Algebra.MAX: lambda values_NC: _without_nan(values_NC, Algebra.MAX).amax(dim=0),
    Algebra.MIN: lambda values_NC: _without_nan(values_NC, Algebra.MIN).amin(dim=0),
}


def _without_nan(values_NC: torch.Tensor, algebra: Algebra) -> torch.Tensor:
    return values_NC.nan_to_num(nan=algebra.identity, posinf=torch.inf, neginf=-torch.inf)
