"""Runs name every element of a tensor once, whatever its strides."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mp_agent.probe.statistics.fused.chunks import RUNS_AT_MOST, StridedRows, runs_of
from tests.agent.probe.statistics.gradients import LAYOUTS


def places(run: StridedRows) -> list[int]:
    return [
        run.offset + number // run.width * run.row_stride + number % run.width * run.column_stride
        for number in range(run.elements)
    ]


def assert_covered(tensor: torch.Tensor) -> None:
    runs = runs_of((tuple(tensor.shape), tensor.stride()))
    assert runs is not None
    memory = torch.arange(tensor.untyped_storage().size() // tensor.itemsize)
    own = memory.as_strided(tensor.shape, tensor.stride())
    assert sorted(place for run in runs for place in places(run)) == sorted(own.ravel().tolist())


def test_every_layout_is_covered_once() -> None:
    for make in LAYOUTS.values():
        tensor = make(torch.float32)
        if tensor.numel() <= 3000:
            assert_covered(tensor)


@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.permutations(range(4)),
    st.lists(st.sampled_from([slice(None), slice(1, None), slice(None, None, 2)]), max_size=4),
)
def test_any_view_is_covered_once(shape: list[int], order: list[int], cuts: list[slice]) -> None:
    tensor = torch.zeros(shape)
    tensor = tensor.permute([axis for axis in order if axis < len(shape)])
    assert_covered(tensor[tuple(cuts[: len(shape)])])


def test_memory_without_gaps_is_one_run_of_rows_of_one() -> None:
    for tensor in (torch.zeros(3, 4), torch.zeros(3, 4).t(), torch.zeros(7), torch.zeros(())):
        (run,) = runs_of((tuple(tensor.shape), tensor.stride())) or []
        assert (run.width, run.row_stride, run.elements) == (1, 1, tensor.numel())


def test_a_tensor_in_very_many_parts_has_no_runs() -> None:
    shape = (RUNS_AT_MOST + 1, 2, 2)
    assert runs_of((shape, (100, 10, 2))) is None
