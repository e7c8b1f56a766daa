"""Counts of exponents, against FP16 itself and at the edges."""

import math

import pytest
import torch

from mp_agent.plan.recommendation.steps import count_exponents


@pytest.mark.parametrize("power", [-8, 0, 5, 16])
def test_what_fp16_loses_is_what_torch_rounds_to_zero(power):
    generator = torch.Generator().manual_seed(power + 8)
    values = torch.randn(20_000, generator=generator) * 2.0 ** (
        -40 * torch.rand(20_000, generator=generator)
    )
    counted = count_exponents(values)
    scaled = values * 2.0**power
    lost = int(((scaled.half() == 0) & (values != 0)).sum())
    assert counted.lost_ratio(2.0**power) == pytest.approx(lost / values.numel(), abs=1e-9)


def test_each_exponent_is_the_floor_of_the_logarithm():
    values = torch.tensor([1.0, -1.5, 2.0, 0.75, 3e38, 2.0**-126, 2.0**-149, -(2.0**-140)])
    expected: dict[int, int] = {}
    for value in values.tolist():
        exponent = math.frexp(value)[1] - 1
        expected[exponent] = expected.get(exponent, 0) + 1
    counted = count_exponents(values)
    assert dict(counted.counts) == expected and counted.nonzero == len(values)
    assert counted.abs_max == pytest.approx(3e38)


def test_zeros_and_non_finite_elements_are_counted_apart():
    counted = count_exponents(torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")]))
    assert (counted.zeros, counted.nonfinite, counted.nonzero) == (2, 3, 0)
    assert counted.abs_max == 0.0 and counted.lost_ratio() == 0.0
    assert counted.zero_ratio == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_have_the_same_exponents(dtype):
    values = torch.tensor([2.0**-10, 3.0, 0.5])
    assert count_exponents(values.to(dtype)).counts == count_exponents(values).counts


def test_an_empty_a_sparse_and_a_complex_tensor_are_counted():
    assert count_exponents(torch.empty(0)).nonzero == 0
    indices, values = torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 1.0, 8.0])
    sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    assert dict(count_exponents(sparse).counts) == {1: 1, 3: 1}
    assert dict(count_exponents(torch.tensor([1 + 4j])).counts) == {0: 1, 2: 1}


def test_counts_of_two_tensors_add_up():
    first, second = torch.randn(100), torch.randn(50) * 1e-3
    together = count_exponents(torch.cat((first, second)))
    assert count_exponents(first).plus(count_exponents(second)) == together
