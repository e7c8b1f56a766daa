"""The Triton kernels that measure chunks of gradients, and fold what they find into columns.

A chunk is read once. Its elements are looked at as the bits of float32 without the sign, which
order as magnitudes do: one integer maximum finds the largest magnitude and shows whether there is
NaN or Inf. One less than the bits wraps zero to the largest unsigned integer, so that its minimum
is the smallest magnitude that is not zero, and its sign counts zeros. Only a chunk whose
magnitudes leave what float32 can square is read once more, from the cache, in float64.

Which thread adds an element, and in which order, follows from the element's index alone, never
from where it lies in memory; additions are explicit. So replicas get equal bits.
"""

import triton
import triton.language as tl

from mp_agent.records.columns import (
    GRADIENT_COLUMN_NAMES,
    GRADIENT_COLUMNS,
    GRADIENT_POSITIONS,
)

KINDS = FP32, BF16, FP16 = 0, 1, 2
"""Kinds of elements, a constant of the kernel."""

ROWS = 256
"""Rows of 16 bytes that a block reads at once, one to a thread."""

WARPS = 8

CHUNK_FIELDS = 7
"""int64 of a chunk: tensor, offset, elements, column, width, row_stride, column_stride; of these
offset and strides in elements. Element `e` of it is at row `(column + e) // width`."""

COUNTS = 6
"""int32 of a chunk's partial statistics."""

SUMS = 2
"""float64 of a chunk's partial statistics: the sum of squares and that of magnitudes."""

_FIELDS = tl.constexpr(CHUNK_FIELDS)
_COUNTS = tl.constexpr(COUNTS)
_SUMS = tl.constexpr(SUMS)
_FP32, _BF16, _FP16 = tl.constexpr(FP32), tl.constexpr(BF16), tl.constexpr(FP16)

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_UPPER_MAGNITUDE = tl.constexpr(0x7FFF0000)
_INF = tl.constexpr(0x7F800000)
_NO_SMALLEST = tl.constexpr(0xFFFFFFFF)

_TRUSTED_MIN = tl.constexpr(0x2B800000)
"""The bits of 2^-40: with such an element, squares that vanish change a sum by under 2^-30."""
_TRUSTED_MAX = tl.constexpr(0x5D800000)
"""The bits of 2^60: eight squares of less add up within float32."""


@triton.jit
def _half_magnitude(bits, KIND: tl.constexpr):
    """Return the float32 bits of the magnitude of a 16-bit float, given in an int32."""
    if KIND == _BF16:
        return (bits << 16) & _MAGNITUDE
    half = (bits & 0x7FFF).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _note(magnitude, row_sum, row_abs, peak, smallest, zeros, ABS_SUM: tl.constexpr):
    """Take in one element of each row, given by the bits of its magnitude."""
    value = magnitude.to(tl.float32, bitcast=True)
    row_sum = tl.fma(value, value, row_sum)
    if ABS_SUM:
        row_abs += value
    peak = tl.maximum(peak, magnitude)
    below = magnitude - 1
    zeros += below >> 31
    smallest = tl.minimum(smallest, below.to(tl.uint32, bitcast=True))
    return row_sum, row_abs, peak, smallest, zeros


@triton.jit
def _note_word(
    word, row_sum, row_abs, peak, smallest, zeros, KIND: tl.constexpr, ABS_SUM: tl.constexpr
):
    """Take in the one or two elements of a 32-bit word of each row, in memory order."""
    if KIND == _FP32:
        row_sum, row_abs, peak, smallest, zeros = _note(
            word & _MAGNITUDE, row_sum, row_abs, peak, smallest, zeros, ABS_SUM
        )
    else:
        row_sum, row_abs, peak, smallest, zeros = _note(
            _half_magnitude(word & 0xFFFF, KIND), row_sum, row_abs, peak, smallest, zeros, ABS_SUM
        )
        if KIND == _BF16:
            upper = word & _UPPER_MAGNITUDE
        else:
            upper = _half_magnitude((word >> 16) & 0xFFFF, KIND)
        row_sum, row_abs, peak, smallest, zeros = _note(
            upper, row_sum, row_abs, peak, smallest, zeros, ABS_SUM
        )
    return row_sum, row_abs, peak, smallest, zeros


@triton.jit
def _note_words(
    words,
    row_sum,
    row_abs,
    peak,
    smallest,
    zeros,
    KIND: tl.constexpr,
    ABS_SUM: tl.constexpr,
    R: tl.constexpr,
):
    """Take in rows of 16 bytes: int32 [R, 4]."""
    even, odd = tl.split(tl.reshape(words, (R, 2, 2)))
    word_0, word_2 = tl.split(even)
    word_1, word_3 = tl.split(odd)
    row_sum, row_abs, peak, smallest, zeros = _note_word(
        word_0, row_sum, row_abs, peak, smallest, zeros, KIND, ABS_SUM
    )
    row_sum, row_abs, peak, smallest, zeros = _note_word(
        word_1, row_sum, row_abs, peak, smallest, zeros, KIND, ABS_SUM
    )
    row_sum, row_abs, peak, smallest, zeros = _note_word(
        word_2, row_sum, row_abs, peak, smallest, zeros, KIND, ABS_SUM
    )
    row_sum, row_abs, peak, smallest, zeros = _note_word(
        word_3, row_sum, row_abs, peak, smallest, zeros, KIND, ABS_SUM
    )
    return row_sum, row_abs, peak, smallest, zeros


@triton.jit
def _magnitude(bits, KIND: tl.constexpr):
    """Return the magnitude bits of elements as they were loaded."""
    if KIND == _FP32:
        return bits & _MAGNITUDE
    return _half_magnitude(bits.to(tl.int32), KIND)


_ALL_ARGUMENTS = (
    "pointers", "chunks", "chunk_numbers", "sums", "counts",
)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_ALL_ARGUMENTS)
def measure_chunks(
    pointers, chunks, chunk_numbers, sums, counts,
    KIND: tl.constexpr, ABS_SUM: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the partial statistics of one chunk per program.

    pointers: int64 [tensors], 0 for one that is not there. chunks: int64 [chunks, CHUNK_FIELDS].
    chunk_numbers: int32, which of them have elements of this kind. sums: float64 [chunks, SUMS].
    counts: int32 [chunks, COUNTS]: bits of the largest and, less one, of the smallest magnitude,
    zeros, NaN, Inf, elements.
    """
    number = tl.load(chunk_numbers + tl.program_id(0)).to(tl.int64)
    chunk = chunks + number * _FIELDS
    address = tl.load(pointers + tl.load(chunk))
    count = tl.load(chunk + 2, mask=address != 0, other=0).to(tl.int32)
    column = tl.load(chunk + 3).to(tl.int32)
    width = tl.load(chunk + 4).to(tl.int32)
    row_stride = tl.load(chunk + 5)
    column_stride = tl.load(chunk + 6)

    row = tl.arange(0, R)
    row_squares = tl.zeros((R,), tl.float64)
    row_magnitudes = tl.zeros((R,), tl.float64)
    peak = tl.zeros((R,), tl.int32)
    smallest = tl.full((R,), _NO_SMALLEST, tl.uint32)
    zeros = tl.zeros((R,), tl.int32)
    VALUES: tl.constexpr = 4 if KIND == _FP32 else 8
    if KIND == _FP32:
        elements = address.to(tl.pointer_type(tl.int32)) + tl.load(chunk + 1)
    else:
        elements = address.to(tl.pointer_type(tl.int16)) + tl.load(chunk + 1)
    BLOCK: tl.constexpr = R * VALUES

    pairs = 0
    if (width == 1) & (row_stride == 1):  # without gaps
        pairs = count // (2 * BLOCK)
        position = elements.to(tl.int64)
        if position % 16 == 0:
            base = address - address % 4
            words = base.to(tl.pointer_type(tl.int32)) + (position - base) // 4
            words = tl.multiple_of(words, 16)  # of a sum: of a cast the compiler forgets it
            at = row[:, None] * 4 + tl.arange(0, 4)[None, :]
            for pair in range(pairs):
                first = tl.load(words + (pair * 2 * R * 4) + at, eviction_policy="evict_first")
                second = tl.load(words + (pair * 2 + 1) * R * 4 + at, eviction_policy="evict_first")
                row_sum = tl.zeros((R,), tl.float32)
                row_abs = tl.zeros((R,), tl.float32)
                row_sum, row_abs, peak, smallest, zeros = _note_words(
                    first, row_sum, row_abs, peak, smallest, zeros, KIND, ABS_SUM, R
                )
                row_sum, row_abs, peak, smallest, zeros = _note_words(
                    second, row_sum, row_abs, peak, smallest, zeros, KIND, ABS_SUM, R
                )
                row_squares += row_sum.to(tl.float64)
                row_magnitudes += row_abs.to(tl.float64)
        else:
            for pair in range(pairs):
                row_sum = tl.zeros((R,), tl.float32)
                row_abs = tl.zeros((R,), tl.float32)
                for half in tl.static_range(2):
                    for value in tl.static_range(VALUES):
                        element = (pair * 2 + half) * BLOCK + row * VALUES + value
                        magnitude = _magnitude(tl.load(elements + element), KIND)
                        row_sum, row_abs, peak, smallest, zeros = _note(
                            magnitude, row_sum, row_abs, peak, smallest, zeros, ABS_SUM
                        )
                row_squares += row_sum.to(tl.float64)
                row_magnitudes += row_abs.to(tl.float64)

    blocks = tl.cdiv(count, BLOCK)
    for block in range(pairs * 2, blocks):
        row_sum = tl.zeros((R,), tl.float32)
        row_abs = tl.zeros((R,), tl.float32)
        for value in tl.static_range(VALUES):
            element = block * BLOCK + row * VALUES + value
            place = column + element
            line = place // width
            where = line * row_stride + (place - line * width) * column_stride
            magnitude = _magnitude(tl.load(elements + where, mask=element < count, other=0), KIND)
            row_sum, row_abs, peak, smallest, zeros = _note(
                magnitude, row_sum, row_abs, peak, smallest, zeros, ABS_SUM
            )
        row_squares += row_sum.to(tl.float64)
        row_magnitudes += row_abs.to(tl.float64)
    padding = blocks * BLOCK - tl.maximum(count, pairs * 2 * BLOCK)

    abs_max = tl.max(peak, axis=0)
    sum_squares = tl.sum(row_squares, axis=0)
    abs_sum = tl.sum(row_magnitudes, axis=0)
    nans = 0
    infs = 0
    if (abs_max >= _TRUSTED_MAX) | ((abs_max < _TRUSTED_MIN) & (abs_max > 0)):
        row_squares = tl.zeros((R,), tl.float64)
        row_magnitudes = tl.zeros((R,), tl.float64)
        peak = tl.zeros((R,), tl.int32)
        row_nans = tl.zeros((R,), tl.int32)
        row_infs = tl.zeros((R,), tl.int32)
        for block in range(blocks):
            for value in tl.static_range(VALUES):
                element = block * BLOCK + row * VALUES + value
                place = column + element
                line = place // width
                where = line * row_stride + (place - line * width) * column_stride
                magnitude = _magnitude(
                    tl.load(elements + where, mask=element < count, other=0), KIND
                )
                row_nans += (magnitude > _INF).to(tl.int32)
                row_infs += (magnitude == _INF).to(tl.int32)
                magnitude = tl.where(magnitude < _INF, magnitude, 0)
                peak = tl.maximum(peak, magnitude)
                double = magnitude.to(tl.float32, bitcast=True).to(tl.float64)
                row_squares = tl.fma(double, double, row_squares)
                row_magnitudes += double
        abs_max = tl.max(peak, axis=0)
        sum_squares = tl.sum(row_squares, axis=0)
        abs_sum = tl.sum(row_magnitudes, axis=0)
        nans = tl.sum(row_nans, axis=0)
        infs = tl.sum(row_infs, axis=0)

    tl.store(sums + number * _SUMS, sum_squares)
    if ABS_SUM:
        tl.store(sums + number * _SUMS + 1, abs_sum)
    found = counts + number * _COUNTS
    tl.store(found, abs_max)
    tl.store(found + 1, tl.min(smallest, axis=0).to(tl.int32, bitcast=True))
    tl.store(found + 2, -tl.sum(zeros, axis=0) - padding)
    tl.store(found + 3, nans)
    tl.store(found + 4, infs)
    tl.store(found + 5, count)


FOLD_WARPS = 4

FOLD_BLOCK = 128
"""Chunks of a group that are folded at once."""

_FLOAT64_MAX = tl.constexpr(1.7976931348623157e308)

FOLDED_COLUMNS = (
    "sum_squares",
    "abs_max",
    "zero_elements",
    "nan_elements",
    "inf_elements",
    "elements",
    "abs_min",
    "abs_sum",
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
_ABS_SUM_AT = tl.constexpr(GRADIENT_POSITIONS["abs_sum"])
_POWERS = {column.name: column.unscaling.value for column in GRADIENT_COLUMNS}
_SUM_SQUARES_POWER = tl.constexpr(_POWERS["sum_squares"])
_ABS_MAX_POWER = tl.constexpr(_POWERS["abs_max"])
_ABS_MIN_POWER = tl.constexpr(_POWERS["abs_min"])
_ABS_SUM_POWER = tl.constexpr(_POWERS["abs_sum"])


@triton.jit
def _unscaled(value, inverse_scale, POWER: tl.constexpr):
    """Return `value` of unscaled gradients, at most the largest float64; NaN stays."""
    for _ in tl.static_range(POWER):
        value = value * inverse_scale
    return tl.where(value > _FLOAT64_MAX, _FLOAT64_MAX, value)


_FOLD_ARGUMENTS = ("sums", "counts", "groups", "inverse_scale", "table")


@triton.jit(do_not_specialize_on_alignment=_FOLD_ARGUMENTS)
def fold_groups(
    sums, counts, groups, inverse_scale, table,
    ABS_SUM: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write the columns of one group of consecutive chunks per program.

    sums, counts: what `measure_chunks` wrote. groups: int64 [groups, 2], first chunk and number
    of chunks. inverse_scale: float64. table: float64 [groups, columns].
    """
    group = tl.program_id(0).to(tl.int64)
    first = tl.load(groups + group * 2)
    number = tl.load(groups + group * 2 + 1)
    lane = tl.arange(0, B)
    lane_squares = tl.zeros((B,), tl.float64)
    lane_magnitudes = tl.zeros((B,), tl.float64)
    peak = tl.zeros((B,), tl.int32)
    smallest = tl.full((B,), _NO_SMALLEST, tl.uint32)
    zeros = tl.zeros((B,), tl.int64)
    nans = tl.zeros((B,), tl.int64)
    infs = tl.zeros((B,), tl.int64)
    elements = tl.zeros((B,), tl.int64)
    for start in range(0, number, B):
        there = start + lane < number
        chunk = first + start + lane
        lane_squares += tl.load(sums + chunk * _SUMS, mask=there, other=0.0)
        if ABS_SUM:
            lane_magnitudes += tl.load(sums + chunk * _SUMS + 1, mask=there, other=0.0)
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
    least = tl.min(smallest, axis=0)
    there = least < _INF - 1
    bits = tl.where(there, least, 0).to(tl.int32, bitcast=True) + 1
    abs_min = bits.to(tl.float32, bitcast=True).to(tl.float64)
    unscaled = _unscaled(abs_min, inverse, _ABS_MIN_POWER)
    tl.store(row + _ABS_MIN_AT, tl.where(there, unscaled, absent))
    if ABS_SUM:
        abs_sum = tl.sum(lane_magnitudes, axis=0)
        tl.store(row + _ABS_SUM_AT, _unscaled(abs_sum, inverse, _ABS_SUM_POWER))
    else:
        tl.store(row + _ABS_SUM_AT, absent)
