"""The Triton kernel that folds what was found of chunks into the columns of groups of tensors."""

import triton
import triton.language as tl

from mp_agent.probe.statistics.fused.measure import COUNTS
from mp_agent.records.columns import (
    GRADIENT_COLUMN_NAMES,
    GRADIENT_COLUMNS,
    GRADIENT_POSITIONS,
)

WARPS = 4

FOLD_BLOCK = 128
"""Chunks of a group that are folded at once."""

_COUNTS = tl.constexpr(COUNTS)
_INF = tl.constexpr(0x7F800000)
_NO_SMALLEST = tl.constexpr(0xFFFFFFFF)
_FLOAT64_MAX = tl.constexpr(1.7976931348623157e308)

FOLDED_COLUMNS = (
    "sum_squares",
    "abs_max",
    "zero_elements",
    "nan_elements",
    "inf_elements",
    "elements",
    "abs_min",
)
"""What the kernel writes; all gradient columns have to be among them."""

_COLUMNS = tl.constexpr(len(GRADIENT_COLUMN_NAMES))
_SUM_SQUARES_AT = tl.constexpr(GRADIENT_POSITIONS["sum_squares"])
_ABS_MAX_AT = tl.constexpr(GRADIENT_POSITIONS["abs_max"])
_ZEROS_AT = tl.constexpr(GRADIENT_POSITIONS["zero_elements"])
_NANS_AT = tl.constexpr(GRADIENT_POSITIONS["nan_elements"])
_INFS_AT = tl.constexpr(GRADIENT_POSITIONS["inf_elements"])
_ELEMENTS_AT = tl.constexpr(GRADIENT_POSITIONS["elements"])
_ABS_MIN_AT = tl.constexpr(GRADIENT_POSITIONS["abs_min"])
_POWERS = {column.name: column.unscaling.value for column in GRADIENT_COLUMNS}
_SUM_SQUARES_POWER = tl.constexpr(_POWERS["sum_squares"])
_ABS_MAX_POWER = tl.constexpr(_POWERS["abs_max"])
_ABS_MIN_POWER = tl.constexpr(_POWERS["abs_min"])


@triton.jit
def _unscaled(value, inverse_scale, POWER: tl.constexpr):
    """Return `value` of unscaled gradients, at most the largest float64; NaN stays."""
    for _ in tl.static_range(POWER):
        value = value * inverse_scale
    return tl.where(value > _FLOAT64_MAX, _FLOAT64_MAX, value)


_FOLD_ARGUMENTS = ("squares", "counts", "groups", "inverse_scale", "table")


@triton.jit(do_not_specialize_on_alignment=_FOLD_ARGUMENTS)
def fold_groups(
    squares, counts, groups, inverse_scale, table,
    SMALLEST: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write the columns of one group of consecutive chunks per program.

    squares, counts: what `measure_chunks` wrote. groups: int64 [groups, 2], first chunk and number
    of chunks. inverse_scale: float64. table: float64 [groups, columns].
    """
    group = tl.program_id(0).to(tl.int64)
    first = tl.load(groups + group * 2)
    number = tl.load(groups + group * 2 + 1)
    lane = tl.arange(0, B)
    lane_squares = tl.zeros((B,), tl.float64)
    peak = tl.zeros((B,), tl.int32)
    smallest = tl.full((B,), _NO_SMALLEST, tl.uint32)
    zeros = tl.zeros((B,), tl.int64)
    nans = tl.zeros((B,), tl.int64)
    infs = tl.zeros((B,), tl.int64)
    elements = tl.zeros((B,), tl.int64)
    for start in range(0, number, B):
        there = start + lane < number
        chunk = first + start + lane
        lane_squares += tl.load(squares + chunk, mask=there, other=0.0)
        found = counts + chunk * _COUNTS
        peak = tl.maximum(peak, tl.load(found, mask=there, other=0))
        least = tl.load(found + 1, mask=there, other=-1)
        smallest = tl.minimum(smallest, least.to(tl.uint32, bitcast=True))
        zeros += tl.load(found + 2, mask=there, other=0)
        nans += tl.load(found + 3, mask=there, other=0)
        infs += tl.load(found + 4, mask=there, other=0)
        elements += tl.load(found + 5, mask=there, other=0)

    inverse = tl.load(inverse_scale)
    row = table + group * _COLUMNS
    sum_squares = tl.sum(lane_squares, axis=0)
    tl.store(row + _SUM_SQUARES_AT, _unscaled(sum_squares, inverse, _SUM_SQUARES_POWER))
    abs_max = tl.max(peak, axis=0).to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(row + _ABS_MAX_AT, _unscaled(abs_max, inverse, _ABS_MAX_POWER))
    tl.store(row + _ZEROS_AT, tl.sum(zeros, axis=0).to(tl.float64))
    tl.store(row + _NANS_AT, tl.sum(nans, axis=0).to(tl.float64))
    tl.store(row + _INFS_AT, tl.sum(infs, axis=0).to(tl.float64))
    tl.store(row + _ELEMENTS_AT, tl.sum(elements, axis=0).to(tl.float64))
    absent = tl.full((), float("nan"), tl.float64)
    if SMALLEST:
        least = tl.min(smallest, axis=0)
        there = least < _INF - 1
        bits = tl.where(there, least, 0).to(tl.int32, bitcast=True) + 1
        abs_min = bits.to(tl.float32, bitcast=True).to(tl.float64)
        unscaled = _unscaled(abs_min, inverse, _ABS_MIN_POWER)
        tl.store(row + _ABS_MIN_AT, tl.where(there, unscaled, absent))
    else:
        tl.store(row + _ABS_MIN_AT, absent)
