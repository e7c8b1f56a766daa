"""How a set of gradients is cut into chunks: tables that stay the same as long as forms do."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mp_agent.probe.statistics.fused.runs import Form, StridedRows, runs_of

CHUNK_ELEMENTS = 64 * 1024

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In the order of the kernels' kinds."""

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
    """[chunks, 7]: as `measure.CHUNK_FIELDS` says; the chunks of a group stand together."""
    of_kind: tuple[Int64Array, ...]
    """For each kind of elements, the numbers of its chunks."""
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
