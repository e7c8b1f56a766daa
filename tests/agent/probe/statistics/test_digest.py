"""Digests of weights: exact, the same on every implementation, and blind to the order."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mp_agent.probe.statistics.base import GradientStatistics
from mp_agent.probe.statistics.host.cpu import CpuStatistics
from mp_agent.probe.statistics.packed.statistics import PackedStatistics

MODULUS = 2**48


def expected(tensors: list[torch.Tensor]) -> float:
    """By Python's own integers, element by element."""
    double = any(tensor.dtype is torch.float64 for tensor in tensors)
    total = 0
    for tensor in tensors:
        real = torch.view_as_real(tensor.contiguous()) if tensor.is_complex() else tensor
        wide = real.to(torch.float64 if double else torch.float32).contiguous().numpy()
        total += sum(map(int, wide.ravel().view(np.int64 if double else np.int32).tolist()))
    return float(total % MODULUS)


IMPLEMENTATIONS: dict[str, Callable[[], GradientStatistics]] = {
    "cpu": CpuStatistics,
    "packed": lambda: PackedStatistics(torch.device("cpu"), row_elements=16, scratch_rows=4),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def digest(request):
    return IMPLEMENTATIONS[request.param]().digest


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
def test_is_the_sum_of_all_bits(digest, case):
    assert digest(CASES[case]).item() == expected(CASES[case])


def test_does_not_depend_on_the_order(digest):
    values = draw(100)
    one = digest([values[:30], values[30:]])
    assert one.item() == digest([values[30:].flip(0), values[:30].flip(0)]).item()


@pytest.mark.parametrize("index", [0, 15, 16, 99])
def test_shows_a_single_bit_that_differs(digest, index):
    values = draw(100)
    other = values.clone()
    other.view(torch.int32)[index] ^= 1
    assert digest([values]).item() != digest([other]).item()


def test_is_a_float64_and_leaves_the_weights_alone(digest):
    values = draw(100).requires_grad_()
    before = values.detach().clone()
    result = digest([values])
    assert result.dtype is torch.float64
    assert result.shape == ()
    assert not result.requires_grad
    assert torch.equal(values.detach(), before)
