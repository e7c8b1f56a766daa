"""Operands are rounded as the formats are, forward and backward, and only operands."""

from math import inf, isnan, nan

import pytest
import torch

from mp_agent.plan.execution.precision import RoundedOperands, rounded
from mp_agent.plan.precision_plan import FP8_E4M3, FP8_E5M2, TF32
from tests.agent.plan.formats_reference import nearest


@pytest.mark.parametrize("number_format", [FP8_E4M3, FP8_E5M2], ids=lambda one: one.name)
def test_fp8_is_rounded_to_the_nearest_value_after_scaling_by_a_power_of_two(number_format):
    values = torch.randn(2000, generator=torch.Generator().manual_seed(1)) ** 3
    values = torch.cat([values, torch.tensor([0.0, -0.0, 1e-30, -1e-38])])
    largest = float(values.abs().max())
    scale = 1.0
    while largest * scale * 2 <= number_format.largest:
        scale *= 2
    while largest * scale > number_format.largest:
        scale /= 2
    expected = [nearest(value * scale, number_format) / scale for value in values.tolist()]
    assert rounded(values, number_format).tolist() == expected


def test_tf32_keeps_ten_fraction_bits_and_rounds_ties_to_even():
    values = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 1e3
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11), 1e-40, 0.0, 3.3e38])
    values = torch.cat([values, ties])
    expected = []
    for value in values.tolist():
        exponent = max(torch.frexp(torch.tensor(value).double()).exponent.item() - 1, -126)
        unit = 2.0 ** (exponent - 10)
        expected.append(round(value / unit) * unit)
    assert rounded(values, TF32).tolist() == expected


@pytest.mark.parametrize("number_format", [TF32, FP8_E4M3, FP8_E5M2], ids=lambda one: one.name)
def test_what_is_not_finite_stays_and_does_not_change_the_rest(number_format):
    made = rounded(torch.tensor([1.0, nan, inf, -inf, -2.0]), number_format).tolist()
    assert made[0] == 1.0 and isnan(made[1]) and made[2:] == [inf, -inf, -2.0]
    assert rounded(torch.zeros(3), number_format).tolist() == [0.0] * 3
    assert rounded(torch.empty(0), number_format).numel() == 0
    assert rounded(torch.tensor([3]), number_format).dtype is torch.int64


def test_products_read_rounded_operands_forward_and_backward():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 8, generator=generator, requires_grad=True)
    w = torch.randn(4, 8, generator=generator, requires_grad=True)
    grad = torch.randn(5, 4, generator=generator)
    with RoundedOperands(FP8_E4M3):
        y = torch.nn.functional.linear(x, w)
        y.backward(grad)
    q = [rounded(one.detach(), FP8_E4M3) for one in (x, w, grad)]
    torch.testing.assert_close(y.detach(), q[0] @ q[1].T)
    torch.testing.assert_close(x.grad, q[2] @ q[1])
    torch.testing.assert_close(w.grad, q[2].T @ q[0])


def test_other_operations_and_suspended_ones_are_exact():
    x = torch.randn(6, 6)
    with RoundedOperands(FP8_E5M2) as mode:
        assert torch.equal(x + x, 2 * x) and torch.equal(torch.softmax(x, -1), x.softmax(-1))
        mode.suspended = True
        assert torch.equal(x @ x, x.mm(x))
    assert torch.equal(x @ x, torch.mm(x, x))


def test_operands_that_become_zero_are_counted():
    with RoundedOperands(FP8_E4M3) as mode:
        torch.mm(torch.tensor([[1.0, 1e-9]]), torch.tensor([[1.0], [1.0]]))
    assert mode.underflow_ratio == 0.25
