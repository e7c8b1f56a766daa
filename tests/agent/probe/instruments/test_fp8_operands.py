"""What a cast to FP8 flushes of one tensor, against torch's cast and exact fractions."""

from math import inf, isnan, nan

import pytest
import torch
from torch import nn

from mp_agent.probe.instruments import fp8_operands
from mp_agent.probe.instruments.fp8_operands import FORMATS, Operand, operand_row, usable
from mp_agent.records.columns import FP8
from tests.agent.probe.instruments.fp8_reference import DTYPES, by_cast, by_fractions
from tests.subtests import each

OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")


def counts(tensor: torch.Tensor, operand: Operand) -> tuple[float, float, float]:
    row = dict(zip(FP8.names, operand_row(tensor, operand).tolist(), strict=True))
    assert row["tensors"] == 1.0
    own = {"tensors", "nonfinite_elements", f"{operand}_elements", f"{operand}_flushed_elements"}
    assert all(isnan(value) for name, value in row.items() if name not in own)
    return (
        row["nonfinite_elements"],
        row[f"{operand}_elements"],
        row[f"{operand}_flushed_elements"],
    )


@pytest.mark.parametrize("operand", OPERANDS)
def test_the_limits_are_those_of_torch(operand):
    info = torch.finfo(DTYPES[operand])
    assert FORMATS[operand].largest == info.max
    assert FORMATS[operand].zero_up_to == info.tiny * info.eps / 2.0


@each("operand", OPERANDS)
@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counts_equal_those_of_a_cast(operand, dtype):
    torch.manual_seed(2)
    tensor = (torch.randn(3000) * torch.logspace(-14, 4, 3000)).to(dtype)
    nonfinite, nonzero, flushed = by_cast(tensor, operand)
    assert 0.0 < flushed < nonzero
    assert counts(tensor, operand) == (nonfinite, nonzero, flushed)


@pytest.mark.parametrize("operand", OPERANDS)
def test_exactly_half_of_the_smallest_number_is_flushed_and_no_more(operand):
    largest, half = FORMATS[operand].largest, FORMATS[operand].zero_up_to
    edge = torch.tensor([largest, half, -half, half * (1 + 2**-23), 2 * half, -0.0])
    assert counts(edge, operand) == (0.0, 5.0, 2.0) == by_cast(edge, operand)
    # At a scale that is no power of two the limit is not a number of the format.
    scaled = edge * 0.7
    assert counts(scaled, operand) == by_fractions(scaled.tolist(), operand)


@each(
    "tensor",
    [
        torch.tensor([nan, inf, -inf, 1.0, 1e-30, -0.0, 0.0]),
        torch.zeros(5),
        torch.tensor([-0.0]),
        torch.full((4,), nan),
        torch.tensor(3.0),
        torch.tensor([5e-324, 1e-310, 1.0], dtype=torch.float64),
        torch.tensor([5e-324, 1e-323], dtype=torch.float64),
        torch.tensor([1.7e308, 1.0, -1e300], dtype=torch.float64),
        torch.tensor([1e-45, 1e-38, 3e38, 1.0]),
        torch.randn(6, 4).t()[::2],
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    ],
)
@each("operand", OPERANDS)
def test_edges_and_odd_shapes_equal_exact_fractions(tensor, operand):
    assert counts(tensor, operand) == by_fractions(tensor.double().flatten().tolist(), operand)


def test_pieces_share_the_scale_of_the_whole_tensor(monkeypatch):
    monkeypatch.setattr(fp8_operands, "_HOST_PIECE_ELEMENTS", 7)
    tensor = torch.logspace(-12, 3, 50)
    assert counts(tensor, "input") == by_cast(tensor, "input")


def test_no_number_is_read_from_the_device(monkeypatch):
    def read(*_: object) -> float:
        raise AssertionError("read")

    for name in ("__float__", "__bool__", "__int__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, read)
    row_C = operand_row(torch.logspace(-12, 3, 50), "gradient")
    monkeypatch.undo()
    assert row_C.dtype is torch.float64


@each(
    "value",
    [
        None,
        3.0,
        torch.empty(0),
        torch.arange(3),
        torch.eye(2).to_sparse(),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, device="meta"),
    ],
)
def test_what_is_no_dense_tensor_of_numbers_is_left_out(value):
    assert usable(value) is None


def test_a_parameter_is_measured_without_its_graph():
    found = usable(nn.Parameter(torch.ones(2)))
    assert found is not None and not found.requires_grad


def test_an_operand_of_a_layer_that_casts_it_is_counted_as_such():
    at = FP8.names.index("cast_tensors")
    assert operand_row(torch.ones(3), "input", is_cast=True)[at] == 1.0
    assert operand_row(torch.ones(3), "input")[at].isnan()
