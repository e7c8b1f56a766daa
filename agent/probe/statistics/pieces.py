"""What all kernels share: pieces of a tensor, foldings, digests, and the table of their results.

Kernels give results by name; the order of columns is known here alone.

The smallest magnitude that is not zero takes two passes over numbers of either sign.
Twice the bits of a float, less one, leaves out its sign, and wraps zero to the largest unsigned
integer; the same less half the range orders alike as signed integers, of which torch knows the
smallest. NaN and Inf come after all finite numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from math import nan
from sys import float_info
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mp_agent.records.columns import (
    GRADIENT_COLUMNS,
    GRADIENTS,
    ColumnFamily,
    Tier,
    Unscaling,
)
from mp_agent.records.columns.column import Algebra, FloatArray


def stored_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the real numbers that a gradient stores, as a strided tensor of any shape."""
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce() if gradient.layout is torch.sparse_coo else gradient
        gradient = gradient.values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient


def pieces(values: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield views that cover `values` once, each of 1 to `limit` elements.

    Where memory has no gaps they are one-dimensional and contiguous, in memory order; else they
    keep the shape of the part that they cover.
    """
    count = values.numel()
    if count == 0:
        return
    flat = _flat_view(values)
    if flat is not None:
        yield from torch.split(flat, limit) if count > limit else (flat,)
    elif count <= limit:
        yield values
    else:
        rows = max(1, limit * values.shape[0] // count)
        for part in torch.split(values, rows) if values.shape[0] > 1 else (values[0],):
            yield from pieces(part, limit)


def _flat_view(values: torch.Tensor) -> torch.Tensor | None:
    """Return all elements as one contiguous dimension, or None where memory has gaps or overlap."""
    if values.is_contiguous():
        return values.view(-1)
    expected_stride = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1:
            if stride != expected_stride:
                return None
            expected_stride *= size
    return values.as_strided((values.numel(),), (1,))


DIGEST_MASK = 2**32 - 1
"""A sum modulo 2^32 shows every single bit that differs, and sums of it stay exact in a float64."""

DIGEST_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The integers in which a number's bits are read."""


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of strided numbers as integers of at most 32 bits.

    Narrower numbers are widened to 32 bits, which changes none; wider ones are two integers each.
    """
    if values.is_floating_point():
        values = values if values.dtype is torch.float64 else values.float()
    elif values.itemsize < 8:
        return values.int()
    return values.contiguous().view(-1).view(torch.int32)


def _shift(bits: torch.dtype) -> torch.Tensor:
    return torch.tensor(torch.iinfo(bits).max, dtype=bits, device="cpu")


INTEGERS = {**DIGEST_BITS, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""As wide as the floats."""

_SHIFTS = {dtype: _shift(bits) for dtype, bits in INTEGERS.items()}
"""2^31 - 1 is both -1 and minus half the range, modulo 2^32; so with 16 and 64 bits."""


def put_in_order(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `out`, overwritten with integers whose smallest stands for the smallest magnitude.

    out: of the integers as wide as `values`; may lie in the same memory.
    """
    bits = values.view(out.dtype)
    return torch.add(_SHIFTS[values.dtype], bits, alpha=2, out=out)


def magnitudes(ordered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the magnitudes that integers of `put_in_order` stand for; -0.0 for a zero."""
    quarter = torch.iinfo(ordered.dtype).max // 2 + 1
    return (ordered >> 1).add_(quarter + 1).view(dtype)


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
"""Most rows of one layer before they become one: a step may call a layer any number of times."""


def keep_row(family: ColumnFamily, rows: list[torch.Tensor], row: torch.Tensor) -> None:
    """Add a row to those of a layer, of which there are never more than `ROWS_AT_MOST`."""
    if len(rows) == ROWS_AT_MOST:
        rows[:] = [folded(family, rows)]
    rows.append(row)


@cache
def stretches_of(family: ColumnFamily) -> tuple[tuple[slice, Algebra], ...]:
    """Return the runs of neighbouring columns of one algebra, of those that totals have."""
    found, start = [], 0
    for algebra, columns in groupby(column.algebra for column in family.columns[: family.totals]):
        end = start + sum(1 for _ in columns)
        found.append((slice(start, end), algebra))
        start = end
    return tuple(found)


def bounded(value: float) -> float:
    """Return a sum of finite numbers, at most float64's largest magnitude."""
    return min(max(value, -float_info.max), float_info.max)


def send(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a copy of the array on `device`.

    By way of pinned memory on CUDA, since other copies wait for the device; torch keeps that
    memory until the copy is made, and gives it to a later one.
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device, copy=True)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


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


bounded_array: Callable[[FloatArray], FloatArray] = partial(np.minimum, float_info.max)
"""Returns numbers, the largest float64 in place of those beyond it; NaN stays."""


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
