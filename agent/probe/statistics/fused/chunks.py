"""Where the elements of tensors lie, and how kernels split them, in the form that they read."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import nan
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mp_agent.probe.statistics.distribution import BOUNDARIES, SUMS, boundary_table, span_table
from mp_agent.probe.statistics.packed import LAYOUTS_KEPT
from mp_agent.probe.statistics.pieces import send
from mp_agent.records.columns import DISTRIBUTION

Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides, in elements."""

RUNS_AT_MOST = 1024
"""Most parts of one tensor; one in more parts is copied before it is measured."""

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


CHUNK_ELEMENTS = 64 * 1024

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in the order of the kernels' kinds."""

Int64Array = npt.NDArray[np.int64]


class TensorForm(NamedTuple):
    """What of a gradient the tables depend on; its address is sent at each step."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def form(self) -> Form:
        """Return shape and strides."""
        return self.shape, self.strides


FormsByGroup = tuple[tuple[TensorForm, ...], ...]


@dataclass(frozen=True, slots=True)
class ChunkTables:
    """The chunks of some groups of tensors, on the host."""

    chunks: Int64Array
    """[chunks, 7]: as `kernels.CHUNK_FIELDS` says; the chunks of a group are adjacent."""
    of_kind: tuple[Int64Array, ...]
    """Numbers of the chunks of each kind of elements."""
    groups: Int64Array
    """[groups, 2]: first chunk, number of chunks."""


def make_chunk_tables(
    groups: FormsByGroup, chunk_elements: int = CHUNK_ELEMENTS
) -> ChunkTables | None:
    """Return the chunks of all tensors, numbered through all groups.

    None where the kernels do not measure one of them, for its dtype or its strides.
    """
    parts: list[Int64Array] = []
    kinds: list[Int64Array] = []
    bounds = []
    tensor = total = 0
    for group in groups:
        first = total
        for form in group:
            runs = runs_of(form.form) if form.dtype in DTYPES else None
            if runs is None:
                return None
            cut = [_cut(tensor, run, chunk_elements) for run in runs]
            parts += cut
            number = sum(map(len, cut))
            kinds.append(np.full(number, DTYPES.index(form.dtype), dtype=np.int64))
            total += number
            tensor += 1
        bounds.append((first, total - first))
    kind_N = np.concatenate([np.empty(0, dtype=np.int64), *kinds])
    return ChunkTables(
        chunks=np.concatenate([np.empty((0, 7), dtype=np.int64), *parts]),
        of_kind=tuple(np.flatnonzero(kind_N == kind) for kind in range(len(DTYPES))),
        groups=np.array(bounds, dtype=np.int64).reshape(-1, 2),
    )


def _cut(tensor: int, run: StridedRows, chunk_elements: int) -> Int64Array:
    """Return the rows of the chunk table for one run."""
    starts = np.arange(0, run.elements, chunk_elements, dtype=np.int64)
    chunks = np.empty((len(starts), 7), dtype=np.int64)
    lines, columns = np.divmod(starts, run.width)
    chunks[:, 0] = tensor
    chunks[:, 1] = run.offset + lines * run.row_stride
    chunks[:, 2] = np.minimum(chunk_elements, run.elements - starts)
    chunks[:, 3] = columns
    chunks[:, 4:] = run.width, run.row_stride, run.column_stride
    return chunks


@dataclass(slots=True)
class DeviceTables:
    """What the kernels need to know of some groups of tensors.

    chunks, of_kind, groups: of `ChunkTables`. pointers: the addresses that were sent last.
    """

    chunks: torch.Tensor
    of_kind: tuple[torch.Tensor, ...]
    groups: torch.Tensor
    pointers: torch.Tensor
    addresses: list[int]


def scalar_on(device: torch.device, value: float | torch.Tensor) -> torch.Tensor:
    """Return a number as a float64 that the kernels read on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)


class KeptTables:
    """The tables of the latest sets of gradients, those of each stream separately.

    Optimizers on several streams need not wait for each other.
    """

    def __init__(self, device: torch.device, chunk_elements: int) -> None:
        self._device = device
        self._chunk_elements = chunk_elements
        self._tables: dict[tuple[int, FormsByGroup], DeviceTables | None] = {}

    def ready(self, groups: FormsByGroup, addresses: list[int]) -> DeviceTables | None:
        """Return tables of tensors at these addresses, 0 for one that is not there.

        Sends what has changed. None where the kernels cannot measure one of the tensors.
        """
        key = (self._stream(), groups)
        if key not in self._tables:
            if len(self._tables) >= LAYOUTS_KEPT:
                self._tables.clear()
            self._tables[key] = self._sent(groups, addresses)
        tables = self._tables[key]
        if tables is not None and tables.addresses != addresses:
            tables.pointers = self._pointers(addresses)
            tables.addresses = addresses
        return tables

    def _sent(self, groups: FormsByGroup, addresses: list[int]) -> DeviceTables | None:
        tables = make_chunk_tables(groups, self._chunk_elements)
        if tables is None:
            return None
        return DeviceTables(
            chunks=send(tables.chunks, self._device),
            of_kind=tuple(
                send(numbers.astype(np.int32), self._device) for numbers in tables.of_kind
            ),
            groups=send(tables.groups, self._device),
            pointers=self._pointers(addresses),
            addresses=addresses,
        )

    def _pointers(self, addresses: list[int]) -> torch.Tensor:
        return send(np.array(addresses, dtype=np.int64), self._device)

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return torch.cuda.current_stream(self._device).cuda_stream


class DistributionRows:
    """Measures layers: a launch finds edges, one per dtype counts, and one folds.

    launches: the module that launches the kernels, which needs Triton.
    """

    def __init__(self, device: torch.device, launches: ModuleType) -> None:
        self._device = device
        self._launches = launches
        self._boundaries = send(boundary_table(), device)
        self._spans = send(span_table(), device)

    def measure(
        self,
        tables: DeviceTables,
        inverse_scale: float | torch.Tensor,
        loss_scale: float | torch.Tensor | None,
    ) -> torch.Tensor:
        """Return float64 [L, C], a row per group of the tables."""
        launches, device = self._launches, self._device
        inverse = scalar_on(device, inverse_scale)
        scale = scalar_on(device, nan if loss_scale is None else loss_scale)
        chunks, layers = len(tables.chunks), len(tables.groups)
        edges = torch.empty(BOUNDARIES, dtype=torch.int32, device=device)
        counts = torch.empty((chunks, BOUNDARIES), dtype=torch.int32, device=device)
        sums = torch.empty((chunks, SUMS), dtype=torch.float64, device=device)
        rows_LC = torch.empty((layers, len(DISTRIBUTION.names)), dtype=torch.float64, device=device)
        launches.launch_edges(self._boundaries, inverse, scale, edges)
        for kind, numbers in enumerate(tables.of_kind):
            if len(numbers):
                launches.launch_count(
                    tables.pointers, tables.chunks, numbers, edges, counts, sums, kind
                )
        if layers:
            launches.launch_fold(counts, sums, tables.groups, self._spans, inverse, scale, rows_LC)
        return rows_LC
