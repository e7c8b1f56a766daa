"""The Triton kernels that count how elements are distributed, and fold the counts of layers.

`find_edges` turns the boundaries into bits of float32, so that `count_chunks` compares integers
and yet counts what arithmetic in float64 would. Its walk through a chunk is not that of
`measure_chunks`: with two dozen comparisons per element, loads of 16 bytes and the code that takes
them apart would save little. As there, which thread adds an element, and in which order, follows
from its index alone. What launches them is at the end; what is compiled depends on nothing but the
kind of elements.
"""

import torch
import triton
import triton.language as tl

from mp_agent.probe.statistics import distribution
from mp_agent.probe.statistics.distribution import BOUNDARIES, COLUMNS, SUMS
from mp_agent.probe.statistics.fused.kernels import BF16, CHUNK_FIELDS, FP32, KINDS
from mp_agent.records.columns import DISTRIBUTION

__all__ = ["COLUMNS", "compile_all", "launch_count", "launch_edges", "launch_fold", "launch_once"]

ROWS = 256
"""Elements that a block reads at once, one to a thread; each thread counts for all boundaries."""

WARPS = 8

_FIELDS = tl.constexpr(CHUNK_FIELDS)
_SUMS = tl.constexpr(SUMS)
_FP32, _BF16 = tl.constexpr(FP32), tl.constexpr(BF16)
_BOUNDARIES = tl.constexpr(BOUNDARIES)
_FIRST = tl.constexpr(16)
_REST = tl.constexpr(BOUNDARIES - 16)
"""Tensors have sizes that are powers of two, hence two of them."""
_NONFINITE = tl.constexpr(distribution.NONFINITE)
_LANES = tl.constexpr(32)
_ADDED_AT_ONCE = tl.constexpr(4)
"""Elements of a thread that are added up in float32: that errs by under 2^-22 of magnitudes' sum.
With 8 the compiler for sm_90 takes 118 registers for BF16 in place of 64."""

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)
_TRUSTED_MIN = tl.constexpr(0x2B800000)
_TRUSTED_MAX = tl.constexpr(0x5D800000)
"""As in the kernels of gradients."""

_EDGES_ARGUMENTS = ("table", "inverse_scale", "loss_scale", "edges")


@triton.jit(do_not_specialize_on_alignment=_EDGES_ARGUMENTS)
def find_edges(table, inverse_scale, loss_scale, edges):
    """Write for each boundary the first bits of a magnitude at or beyond it, at most those of Inf.

    table: float64 [boundaries, 2], of `boundary_table`. inverse_scale, loss_scale: float64.
    edges: int32 [boundaries]. What is not finite when unscaled is beyond every boundary.
    """
    boundary = tl.arange(0, _LANES)
    there = boundary < _BOUNDARIES
    least = tl.load(table + boundary * 2, mask=there, other=0.0)
    loss_scaled = tl.load(table + boundary * 2 + 1, mask=there, other=0.0) > 0.0
    inverse = tl.abs(tl.load(inverse_scale))
    scale = tl.load(loss_scale)
    low = tl.zeros((_LANES,), tl.int32)
    high = tl.full((_LANES,), _INF, tl.int32)
    for _ in range(31):
        middle = low + ((high - low) >> 1)
        value = middle.to(tl.float32, bitcast=True).to(tl.float64) * inverse
        below = value < float("inf")
        below &= tl.where(loss_scaled, value * scale, value) < least
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    tl.store(edges + boundary, low, mask=there)


@triton.jit
def _float32_bits(bits, KIND: tl.constexpr):
    """Return the bits as float32 of elements as they were loaded."""
    if KIND == _BF16:
        bits = bits.to(tl.int32) << 16
    elif KIND != _FP32:
        half = bits.to(tl.float16, bitcast=True)
        bits = half.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _less_those_below(counts, magnitude, edges):
    """Return counts [edges, rows], one less where the magnitude of a row is below an edge."""
    return counts + ((magnitude[None, :] - edges) >> 31)


@triton.jit
def _added(bits, magnitude, peak, added, squares):
    """Take in one element of each row."""
    value = bits.to(tl.float32, bitcast=True)
    return tl.maximum(peak, magnitude), added + value, tl.fma(value, value, squares)


_COUNT_ARGUMENTS = (
    "pointers", "chunks", "chunk_numbers", "edges", "counts", "sums",
)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_COUNT_ARGUMENTS)
def count_chunks(
    pointers, chunks, chunk_numbers, edges, counts, sums,
    KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the partial statistics of one chunk per program.

    pointers, chunks, chunk_numbers: as `measure_chunks` has them. edges: of `find_edges`.
    counts: int32 [chunks, boundaries], elements at or beyond each. sums: float64 [chunks, SUMS],
    of the elements below `NONFINITE`, as they are.
    """
    number = tl.load(chunk_numbers + tl.program_id(0)).to(tl.int64)
    chunk = chunks + number * _FIELDS
    address = tl.load(pointers + tl.load(chunk))
    count = tl.load(chunk + 2, mask=address != 0, other=0).to(tl.int32)
    column = tl.load(chunk + 3).to(tl.int32)
    width = tl.load(chunk + 4).to(tl.int32)
    row_stride = tl.load(chunk + 5)
    column_stride = tl.load(chunk + 6)
    if KIND == _FP32:
        elements = address.to(tl.pointer_type(tl.int32)) + tl.load(chunk + 1)
    else:
        elements = address.to(tl.pointer_type(tl.int16)) + tl.load(chunk + 1)

    # With rows last, a thread has one row and all edges.
    first = tl.arange(0, _FIRST)
    rest = _FIRST + tl.arange(0, _REST)
    first_edges = tl.load(edges + first)[:, None]
    rest_edges = tl.load(edges + rest)[:, None]
    first_counts = tl.zeros((_FIRST, R), tl.int32)
    rest_counts = tl.zeros((_REST, R), tl.int32)
    row = tl.arange(0, R)
    sum_R = tl.zeros((R,), tl.float64)
    squares_R = tl.zeros((R,), tl.float64)
    peak = tl.zeros((R,), tl.int32)
    BLOCK: tl.constexpr = R * _ADDED_AT_ONCE

    without_gaps = (width == 1) & (row_stride == 1)
    full = tl.where(without_gaps, count // BLOCK, 0)  # an `if` makes Triton 3.2 abort
    for block in range(full):
        added = tl.zeros((R,), tl.float32)
        squares = tl.zeros((R,), tl.float32)
        for each in tl.static_range(_ADDED_AT_ONCE):
            bits = _float32_bits(tl.load(elements + (block * BLOCK + each * R) + row), KIND)
            magnitude = bits & _MAGNITUDE
            first_counts = _less_those_below(first_counts, magnitude, first_edges)
            rest_counts = _less_those_below(rest_counts, magnitude, rest_edges)
            peak, added, squares = _added(bits, magnitude, peak, added, squares)
        sum_R += added.to(tl.float64)
        squares_R += squares.to(tl.float64)

    blocks = tl.cdiv(count, BLOCK)
    for block in range(full, blocks):
        added = tl.zeros((R,), tl.float32)
        squares = tl.zeros((R,), tl.float32)
        for each in tl.static_range(_ADDED_AT_ONCE):
            element = block * BLOCK + each * R + row
            place = column + element
            line = place // width
            where = line * row_stride + (place - line * width) * column_stride
            there = element < count
            bits = _float32_bits(tl.load(elements + where, mask=there, other=0), KIND)
            magnitude = tl.where(there, bits & _MAGNITUDE, -1)  # below all
            first_counts = _less_those_below(first_counts, magnitude, first_edges)
            rest_counts = _less_those_below(rest_counts, magnitude, rest_edges)
            peak, added, squares = _added(bits, magnitude, peak, added, squares)
        sum_R += added.to(tl.float64)
        squares_R += squares.to(tl.float64)

    nonfinite = tl.load(edges + _NONFINITE)
    abs_max = tl.max(peak, axis=0)
    huge = (abs_max >= nonfinite) | (abs_max >= _TRUSTED_MAX)
    tiny = (abs_max < _TRUSTED_MIN) & (abs_max > 0)
    if huge | tiny:
        sum_R = tl.zeros((R,), tl.float64)
        squares_R = tl.zeros((R,), tl.float64)
        for block in range(blocks * _ADDED_AT_ONCE):
            element = block * R + row
            place = column + element
            line = place // width
            where = line * row_stride + (place - line * width) * column_stride
            bits = _float32_bits(tl.load(elements + where, mask=element < count, other=0), KIND)
            bits = tl.where((bits & _MAGNITUDE) < nonfinite, bits, 0)
            double = bits.to(tl.float32, bitcast=True).to(tl.float64)
            sum_R += double
            squares_R = tl.fma(double, double, squares_R)

    found = counts + number * _BOUNDARIES
    tl.store(found + first, blocks * BLOCK + tl.sum(first_counts, axis=1))
    tl.store(found + rest, blocks * BLOCK + tl.sum(rest_counts, axis=1))
    tl.store(sums + number * _SUMS, tl.sum(sum_R, axis=0))
    tl.store(sums + number * _SUMS + 1, tl.sum(squares_R, axis=0))


FOLD_WARPS = 4

FOLD_BLOCK = 32
"""Chunks of a layer that are folded at once."""

_SPAN_FIELDS = tl.constexpr(distribution.SPAN_FIELDS)
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


_EDGES_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
_FOLD_OPTIONS = {
    "B": FOLD_BLOCK,
    "num_warps": FOLD_WARPS,
    "enable_fp_fusion": False,
}


def _count_options(kind: int) -> dict[str, int | bool]:
    return {
        "KIND": kind,
        "R": ROWS,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }


def launch_edges(
    boundaries: torch.Tensor,
    inverse_scale: torch.Tensor,
    loss_scale: torch.Tensor,
    edges: torch.Tensor,
) -> None:
    """Launch `find_edges`."""
    find_edges[(1,)](boundaries, inverse_scale, loss_scale, edges, **_EDGES_OPTIONS)


def launch_count(
    pointers: torch.Tensor,
    chunks: torch.Tensor,
    chunk_numbers: torch.Tensor,
    edges: torch.Tensor,
    counts: torch.Tensor,
    sums: torch.Tensor,
    kind: int,
) -> None:
    """Launch `count_chunks` for all chunks of one kind."""
    count_chunks[(len(chunk_numbers),)](
        pointers, chunks, chunk_numbers, edges, counts, sums, **_count_options(kind)
    )


def launch_fold(
    counts: torch.Tensor,
    sums: torch.Tensor,
    layers: torch.Tensor,
    spans: torch.Tensor,
    inverse_scale: torch.Tensor,
    loss_scale: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Launch `fold_layers` for all layers."""
    fold_layers[(len(layers),)](
        counts, sums, layers, spans, inverse_scale, loss_scale, table, **_FOLD_OPTIONS
    )


_EDGES_TYPES = (torch.float64, torch.float64, torch.float64, torch.int32)
_COUNT_TYPES = (
    *(torch.int64, torch.int64, torch.int32),
    *(torch.int32, torch.int32, torch.float64),
)
_FOLD_TYPES = (
    *(torch.int32, torch.float64, torch.int64, torch.int32),
    *(torch.float64, torch.float64, torch.float64),
)


def compile_all() -> None:
    """Compile every variant for the current device, of which only the model is asked."""
    find_edges.warmup(*_EDGES_TYPES, grid=(1,), **_EDGES_OPTIONS)
    for kind in KINDS:
        count_chunks.warmup(*_COUNT_TYPES, grid=(1,), **_count_options(kind))
    fold_layers.warmup(*_FOLD_TYPES, grid=(1,), **_FOLD_OPTIONS)


def launch_once(device: torch.device) -> None:
    """Launch every variant on no elements, which compiles and loads its kernel if needed."""
    table = torch.zeros(distribution.boundary_table().shape, dtype=torch.float64, device=device)
    spans = torch.zeros(distribution.span_table().shape, dtype=torch.int32, device=device)
    scale = torch.zeros((), dtype=torch.float64, device=device)
    edges = torch.zeros(BOUNDARIES, dtype=torch.int32, device=device)
    pointers = torch.zeros(1, dtype=torch.int64, device=device)
    chunks = torch.zeros((1, CHUNK_FIELDS), dtype=torch.int64, device=device)
    numbers = torch.zeros(1, dtype=torch.int32, device=device)
    counts = torch.zeros((1, BOUNDARIES), dtype=torch.int32, device=device)
    sums = torch.zeros((1, SUMS), dtype=torch.float64, device=device)
    layers = torch.zeros((1, 2), dtype=torch.int64, device=device)
    rows = torch.zeros((1, len(DISTRIBUTION.names)), dtype=torch.float64, device=device)
    launch_edges(table, scale, scale, edges)
    for kind in KINDS:
        launch_count(pointers, chunks, numbers, edges, counts, sums, kind)
    launch_fold(counts, sums, layers, spans, scale, scale, rows)
