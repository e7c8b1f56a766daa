"""Estimates, against sums by hand."""

import pytest

from mp_agent.plan.precision_plan import Hardware, formats_of_cpu, gpu_of_capability
from mp_agent.plan.recommendation.choose import (
    eligible_ratio,
    kept_ratio,
    speed_estimate,
    training_memory,
)
from mp_agent.plan.recommendation.model import MatrixProduct


def product(module, dimensions, flops):
    return MatrixProduct(module=module, operation="mm", dimensions=dimensions, flops=flops)


PRODUCTS = (
    product("a", (8, 16, 64), 60),
    product("b.in", (8, 50, 64), 30),
    product("b.out", (8, 8, 8), 10),
)


def test_shares_are_of_operations():
    assert eligible_ratio(PRODUCTS) == pytest.approx(0.7)
    assert eligible_ratio(PRODUCTS, {"b"}) == pytest.approx(0.6)
    assert kept_ratio(PRODUCTS, {"b"}) == pytest.approx(0.4)
    assert kept_ratio(PRODUCTS, {"b.i"}) == 0 == eligible_ratio(())


def test_the_expected_speed_follows_amdahls_law():
    found = speed_estimate("bf16-autocast", gpu_of_capability((8, 0)), PRODUCTS, ())
    assert found is not None and found.eligible_ratio == pytest.approx(0.7)
    assert found.least_ratio == pytest.approx(1 / (0.3 + 0.7 / 2))
    assert found.most_ratio == pytest.approx(1 / (0.3 + 0.7 / 3))


def test_no_speed_is_expected_without_tensor_cores():
    processor = Hardware(kind="cpu", name="a processor", formats=formats_of_cpu(frozenset()))
    assert speed_estimate("bf16-autocast", processor, PRODUCTS, ()) is None
    assert speed_estimate("fp16-autocast", gpu_of_capability((6, 1)), PRODUCTS, ()) is None
    assert speed_estimate("fp32", gpu_of_capability((8, 0)), PRODUCTS, ()) is None


def test_memory_is_four_bytes_for_each_of_weight_gradient_and_two_moments():
    fp32 = training_memory("fp32", 340, 60, 0, 8000)
    assert fp32.total_bytes == 4 * 400 + 4 * 340 + 8 * 340 + 8000
    mixed = training_memory("fp16-autocast", 340, 60, 300, 4000)
    assert mixed.total_bytes == fp32.total_bytes - 4000 + 2 * 300
    low = training_memory("bf16", 340, 60, 300, 4000)
    assert low.total_bytes == (fp32.total_bytes - 8000) // 2 + 4000
