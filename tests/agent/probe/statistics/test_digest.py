"""Digests of weights: exact, the same on every implementation, and blind to the order."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from mp_agent.probe.statistics import GradientStatistics
from mp_agent.probe.statistics.host import CpuStatistics
from mp_agent.probe.statistics.packed import PackedStatistics

MODULUS = 2**32


def expected(tensor: torch.Tensor) -> float:
    """By Python's own integers, 32 bits at a time."""
    real = torch.view_as_real(tensor.contiguous()) if tensor.is_complex() else tensor
    wide = real if real.dtype is torch.float64 else real.to(torch.float32)
    halves = wide.contiguous().numpy().ravel().view(np.int32).tolist()
    return float(sum(map(int, halves)) % MODULUS)


IMPLEMENTATIONS: dict[str, Callable[[], GradientStatistics]] = {
    "cpu": CpuStatistics,
    "packed": lambda: PackedStatistics(torch.device("cpu"), row_elements=16, scratch_rows=4),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def digests(request):
    return IMPLEMENTATIONS[request.param]().digests


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


CASES = {
    "none": [],
    "empty": [torch.empty(0)],
    "one": [torch.tensor([1.5])],
    "float32": [draw(7, 9), draw(130), draw(1)],
    "bfloat16": [draw(7, 9, dtype=torch.bfloat16)],
    "float16": [draw(33, dtype=torch.float16)],
    "float64": [draw(33, dtype=torch.float64), draw(5)],
    "complex": [torch.complex(draw(6), draw(6, seed=1))],
    "transposed": [draw(7, 9).t()],
    "with gaps": [draw(7, 9)[:, ::2]],
    "expanded": [draw(1, 5).expand(3, 5)],
    "special": [torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, 1e-45])],
    "large magnitudes": [torch.full((1000,), -1.7e308, dtype=torch.float64)],
}


@pytest.mark.parametrize("case", CASES)
def test_are_the_sums_of_all_bits_tensor_by_tensor(digests, case):
    assert digests(CASES[case]).tolist() == list(map(expected, CASES[case]))


def test_of_many_tensors_are_each_its_own(digests):
    tensors = [tensor for case in CASES.values() for tensor in case]
    assert digests(tensors).tolist() == list(map(expected, tensors))


def test_do_not_depend_on_the_order_of_elements(digests):
    values = draw(100)
    one, other = digests([values, values.flip(0)]).tolist()
    assert one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_show_a_single_bit_that_differs(digests, dtype):
    values = draw(100, dtype=dtype)
    for index, bit in product((0, 15, 16, 99), (0, 22, 31)):
        other = values.clone()
        other.view(torch.int32)[index] ^= torch.iinfo(torch.int32).min if bit == 31 else 1 << bit
        one, changed = digests([values, other]).tolist()
        assert one != changed, (index, bit)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_show_integers_that_differ(digests, dtype):
    values = torch.arange(40).remainder(2).to(dtype)
    other = values.clone()
    other[7] = 0
    one, changed = digests([values, other]).tolist()
    assert one != changed


def test_are_float64_and_leave_the_weights_alone(digests):
    values = draw(100).requires_grad_()
    before = values.detach().clone()
    result = digests([values])
    assert result.dtype is torch.float64
    assert result.shape == (1,)
    assert not result.requires_grad
    assert torch.equal(values.detach(), before)
