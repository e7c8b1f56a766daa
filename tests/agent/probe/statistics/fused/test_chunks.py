"""Chunk tables: every element once, the chunks of a group together, each in its kind's list."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_agent.probe.statistics.fused.chunks import DTYPES, TensorForm, make_chunk_tables

CHUNK = 16


def form(tensor: torch.Tensor) -> TensorForm:
    return TensorForm(tensor.dtype, tuple(tensor.shape), tensor.stride())


def tensor_of(rows: int, columns: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, columns + 3, dtype=dtype)[:, :columns:step]


TENSORS = st.builds(
    tensor_of, st.integers(0, 9), st.integers(1, 40), st.integers(1, 3), st.sampled_from(DTYPES)
)


@settings(deadline=None)
@given(st.lists(st.lists(TENSORS, max_size=4), max_size=4))
def test_chunks_cover_every_tensor_once_and_groups_stand_together(
    groups: list[list[torch.Tensor]],
) -> None:
    tables = make_chunk_tables(tuple(tuple(map(form, group)) for group in groups), CHUNK)
    assert tables is not None
    tensors = [tensor for group in groups for tensor in group]
    places: list[list[int]] = [[] for _ in tensors]
    for number, offset, elements, column, width, row_stride, column_stride in tables.chunks:
        assert 1 <= elements <= CHUNK
        place = column + np.arange(elements)
        places[number] += (
            offset + place // width * row_stride + place % width * column_stride
        ).tolist()
    for tensor, found in zip(tensors, places, strict=True):
        size = tensor.untyped_storage().size() // tensor.itemsize
        own = torch.arange(size).as_strided(tensor.shape, tensor.stride())
        assert sorted(found) == sorted(own.ravel().tolist())
    number = 0
    for group, (first, count) in zip(groups, tables.groups, strict=True):
        owners = set(tables.chunks[first : first + count, 0].tolist())
        assert owners == {number + at for at, each in enumerate(group) if each.numel()}
        number += len(group)
    kinds = [DTYPES.index(tensors[owner].dtype) for owner in tables.chunks[:, 0]]
    for kind, numbers in enumerate(tables.of_kind):
        assert numbers.tolist() == [at for at, each in enumerate(kinds) if each == kind]


def test_a_dtype_that_no_kernel_knows_has_no_tables() -> None:
    assert make_chunk_tables(((form(torch.empty(3, dtype=torch.float64)),),)) is None
