"""Norms, losses and lost updates, against a plain training loop."""

import pytest
import torch
from torch import nn

from mp_agent.errors import AdviceError
from mp_agent.plan.execution.training import workload_of
from mp_agent.plan.recommendation.steps import GradientMeasurement, count_exponents
from tests.agent.plan.recommendation.models import odd_network


def plain_run(steps, learning_rate):
    model, (inputs, target), loss = odd_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    norms, losses, gradients, updates, stale = [], [], [], 0, 0
    for _ in range(steps):
        value = loss(model(inputs), target)
        value.backward()
        before = [one.detach().clone() for one in model.parameters()]
        flat = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
        gradients.append(flat)
        norms.append(float(torch.linalg.vector_norm(flat.double())))
        losses.append(float(value.detach()))
        optimizer.step()
        optimizer.zero_grad()
        for old, new in zip(before, model.parameters(), strict=True):
            low, update = old.to(torch.bfloat16), new.detach() - old
            after = (low.float() + update).to(torch.bfloat16)
            updates += int((update != 0).sum())
            stale += int(((after == low) & (update != 0)).sum())
    return norms, losses, torch.cat(gradients), stale / updates


@pytest.mark.parametrize("learning_rate", [1e-4, 1e-2])
def test_the_numbers_are_those_of_a_plain_loop(learning_rate):
    model, batch, loss = odd_network()
    measurement = GradientMeasurement(workload_of(model, batch, loss, 4), learning_rate)
    seen: list[int] = []
    found = measurement.run(4, seen.append)
    norms, losses, gradients, stale = plain_run(4, learning_rate)
    assert seen == [1, 2, 3, 4]
    assert found.norms == pytest.approx(norms, rel=1e-6)
    assert found.losses == pytest.approx(losses, rel=1e-6)
    counted = count_exponents(gradients)
    assert found.parameters.nonzero == counted.nonzero
    assert found.parameters.abs_max == pytest.approx(counted.abs_max, rel=1e-5)
    assert found.stale_ratio == pytest.approx(stale, abs=1e-3)


def test_gradients_of_outputs_are_counted_too():
    model, batch, loss = odd_network()
    found = GradientMeasurement(workload_of(model, batch, loss, 1), 1e-4).run(1, lambda step: None)
    # Outputs of the five layers; the model's own output is that of its last layer.
    features = 64 + 64 + 64 + 50 + 8 + 8
    assert found.outputs.nonzero + found.outputs.zeros == 32 * features


def test_the_model_its_gradients_and_random_numbers_are_as_before():
    model, batch, loss = odd_network()
    model.append(nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    GradientMeasurement(workload_of(model, batch, loss, 3), 0.1).run(3, lambda step: None)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loss_that_is_not_finite_in_fp32_is_refused_by_name():
    model, (inputs, target), loss = odd_network()
    workload = workload_of(model, (inputs * float("inf"), target), loss, 1)
    with pytest.raises(AdviceError, match="the loss is nan at step 1 in FP32 already"):
        GradientMeasurement(workload, 1e-4).run(1, lambda step: None)


def test_a_loss_without_parameters_is_refused():
    model, batch, _ = odd_network()
    workload = workload_of(model, batch, lambda model, batch: batch[0].sum(), 1)
    with pytest.raises(AdviceError, match="depends on no parameter"):
        GradientMeasurement(workload, 1e-4).run(1, lambda step: None)
