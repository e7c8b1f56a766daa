"""Where the elements of a strided tensor lie, in the form that the kernels read."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides, in elements."""

RUNS_AT_MOST = 1024
"""Of one tensor; one in more parts is copied before it is measured."""

WIDTH_AT_MOST = 2**30
"""The kernels count within rows in 32 bits."""


class StridedRows(NamedTuple):
    """Rows at equal distances, of elements at equal distances; all in elements.

    Element `e` lies at `offset + e // width * row_stride + e % width * column_stride`. Elements
    without gaps have rows of width 1.
    """

    offset: int
    elements: int
    width: int
    row_stride: int
    column_stride: int


def runs_of(form: Form) -> list[StridedRows] | None:
    """Return runs that cover a tensor once, in order of their memory; None for too many."""
    shape, strides = form
    if 0 in shape:
        return []
    *outer, rows, columns = [(1, 0), (1, 0), *_merged(shape, strides)]
    if columns[0] > 1 and rows[0] == 1:
        rows, columns = columns, rows
    if columns[0] >= WIDTH_AT_MOST:
        return None
    count = 1
    for size, _ in outer:
        count *= size
    if count > RUNS_AT_MOST:
        return None
    row_stride = rows[1] if rows[0] > 1 else 1
    elements = rows[0] * columns[0]
    return [
        StridedRows(offset, elements, columns[0], row_stride, columns[1])
        for offset in _offsets(outer)
    ]


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return sizes and strides by falling stride, neighbours that are one dimension merged."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(zip(strides, shape, strict=True), reverse=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return merged


def _offsets(dimensions: Sequence[tuple[int, int]]) -> list[int]:
    places = product(*(range(0, size * stride, stride) if stride else [0] * size
                       for size, stride in dimensions))  # fmt: skip
    return [sum(place) for place in places]
