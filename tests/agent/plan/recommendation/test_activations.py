"""Bytes saved for the backward pass, against what can be counted by hand."""

import torch
from torch import nn

from mp_agent.plan.execution.training import workload_of
from mp_agent.plan.precision_plan import PrecisionPlan
from mp_agent.plan.recommendation.steps import measure_saved


def plan_of(precision):
    return PrecisionPlan(precision=precision, device="cpu")


def load():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU())
    return workload_of(model, (torch.randn(10, 16),), lambda m, batch: m(batch[0]).sum(), 1)


def test_saved_bytes_are_those_of_the_activations():
    found = measure_saved(load(), plan_of("fp32"))
    # Both ReLUs save what they return; the second layer reads the first one's. Weights are no
    # activations, and the sum saves nothing.
    assert found.activations_bytes == 4 * 10 * (32 + 24)
    assert found.cast_elements == 0


def test_autocast_halves_them_and_copies_the_weights():
    found = measure_saved(load(), plan_of("bf16-autocast"))
    inputs = 2 * 10 * 16
    assert found.activations_bytes == 2 * 10 * (32 + 24) + inputs
    assert found.cast_elements == 16 * 32 + 32 + 32 * 24 + 24


def test_weights_in_bf16_halve_them_without_copies():
    found = measure_saved(load(), plan_of("bf16"))
    assert found.activations_bytes == 2 * 10 * (32 + 24) and found.cast_elements == 0
