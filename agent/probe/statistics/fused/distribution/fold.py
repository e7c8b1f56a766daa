"""The Triton kernel that folds counts of chunks into the columns of `DISTRIBUTION`."""

import triton
import triton.language as tl

from mp_agent.probe.statistics.fused.distribution import boundaries
from mp_agent.records.columns import DISTRIBUTION

WARPS = 4

FOLD_BLOCK = 32
"""Chunks of a layer that are folded at once."""

_BOUNDARIES = tl.constexpr(boundaries.BOUNDARIES)
_SPAN_FIELDS = tl.constexpr(boundaries.SPAN_FIELDS)
_SUMS = tl.constexpr(boundaries.SUMS)
_COLUMNS = tl.constexpr(len(DISTRIBUTION.names))
_COLUMN_LANES = tl.constexpr(triton.next_power_of_2(len(DISTRIBUTION.names)))
_SUM_AT = tl.constexpr(DISTRIBUTION.names.index("sum"))
_SUM_SQUARES_AT = tl.constexpr(DISTRIBUTION.names.index("sum_squares"))
_FLOAT64_MAX = tl.constexpr(1.7976931348623157e308)


@triton.jit
def _bounded(value):
    """Return a number whose magnitude is at most float64's largest."""
    value = tl.where(value > _FLOAT64_MAX, _FLOAT64_MAX, value)
    return tl.where(value < -_FLOAT64_MAX, -_FLOAT64_MAX, value)


_FOLD_ARGUMENTS = (
    "counts", "sums", "layers", "spans", "inverse_scale", "loss_scale", "table",
)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_FOLD_ARGUMENTS)
def fold_layers(counts, sums, layers, spans, inverse_scale, loss_scale, table, B: tl.constexpr):
    """Write the columns of one layer of consecutive chunks per program.

    counts, sums: what `count_chunks` wrote. layers: int64 [layers, 2], first chunk and number of
    chunks. spans: int32 [columns, SPAN_FIELDS], of `span_table`. inverse_scale, loss_scale:
    float64; one that is not finite is no loss scale. table: float64 [layers, columns].
    """
    layer = tl.program_id(0).to(tl.int64)
    first = tl.load(layers + layer * 2)
    number = tl.load(layers + layer * 2 + 1)
    column = tl.arange(0, _COLUMN_LANES)
    span = spans + column * _SPAN_FIELDS
    begin = tl.load(span, mask=column < _COLUMNS, other=-1)
    end = tl.load(span + 1, mask=column < _COLUMNS, other=-1)
    of_fp16 = tl.load(span + 2, mask=column < _COLUMNS, other=0) != 0
    lane = tl.arange(0, B)
    lane_counts = tl.zeros((_COLUMN_LANES, B), tl.int64)
    lane_sum = tl.zeros((B,), tl.float64)
    lane_squares = tl.zeros((B,), tl.float64)
    for start in range(0, number, B):
        there = start + lane < number
        chunk = first + start + lane
        lane_sum += tl.load(sums + chunk * _SUMS, mask=there, other=0.0)
        lane_squares += tl.load(sums + chunk * _SUMS + 1, mask=there, other=0.0)
        found = (counts + chunk * _BOUNDARIES)[None, :]
        beyond = there[None, :] & (begin >= 0)[:, None]
        lane_counts += tl.load(found + begin[:, None], mask=beyond, other=0)
        beyond = there[None, :] & (end >= 0)[:, None]
        lane_counts -= tl.load(found + end[:, None], mask=beyond, other=0)

    row = table + layer * _COLUMNS
    scale = tl.load(loss_scale)
    absent = tl.where(of_fp16, scale - scale, 0.0)  # NaN of what is not finite
    tl.store(row + column, tl.sum(lane_counts, axis=1).to(tl.float64) + absent, mask=begin >= 0)
    inverse = tl.load(inverse_scale)
    inverse = tl.where(inverse - inverse == 0.0, inverse, 0.0)  # without finite elements
    tl.store(row + _SUM_AT, _bounded(tl.sum(lane_sum, axis=0) * inverse))
    squares = tl.sum(lane_squares, axis=0) * inverse * inverse
    tl.store(row + _SUM_SQUARES_AT, _bounded(squares))
