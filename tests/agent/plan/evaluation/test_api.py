"""A plan is measured against a plain FP32 training."""

import json

import pytest
import torch
from torch import nn

import mp_agent
from mp_agent.errors import AdviceError
from mp_agent.plan.evaluation.api import LEARNING_RATE, STEPS, WARMUP_STEPS
from mp_agent.plan.precision_plan import PrecisionPlan
from tests.agent.plan.evaluation.measured import overflowing_evaluation
from tests.agent.plan.recommendation.models import odd_network

FP32 = PrecisionPlan(precision="fp32", device="cpu")
BF16 = PrecisionPlan(precision="bf16-autocast", device="cpu", clip_norm=0.3, adam_epsilon=1e-7)


def evaluate(plan, model=None, **options):
    made, batch, loss = odd_network()
    options = {"steps": 6, "warmup_steps": 1, "learning_rate": 1e-2, "progress": False, **options}
    return mp_agent.evaluate_plan(model or made, batch, loss, plan, **options)


def plain_losses(steps, autocast):
    model, (inputs, target), loss = odd_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-7)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(model(inputs), target)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses


def test_the_defaults_of_the_public_function_are_those_of_the_package():
    defaults = mp_agent.evaluate_plan.__kwdefaults__
    assert defaults is not None
    found = (defaults["steps"], defaults["warmup_steps"], defaults["learning_rate"])
    assert found == (STEPS, WARMUP_STEPS, LEARNING_RATE)


def test_both_trainings_are_those_of_a_plain_loop():
    found = evaluate(BF16)
    assert list(found.fp32.losses) == plain_losses(6, autocast=False)
    assert list(found.planned.losses) == plain_losses(6, autocast=True)
    pairs = zip(found.perturbed.losses, found.fp32.losses, strict=True)
    assert 0 < max(abs(one - other) for one, other in pairs) < 1e-3
    assert len(found.fp32.seconds) == len(found.planned.seconds) == 6
    assert all(one > 0 for one in (*found.fp32.seconds, *found.planned.seconds))


def test_fp32_against_itself_differs_in_nothing():
    model, _, _ = odd_network()
    model.append(nn.Dropout(0.3))
    found = evaluate(FP32, model)
    assert found.planned.losses == found.fp32.losses
    assert found.loss_difference_ratio == 0.0 == found.memory_saved_ratio
    assert "memory" in found.missed
    assert found.speed_interval[0] <= found.speed_ratio <= found.speed_interval[1]


def test_weights_in_bf16_save_half_of_the_memory():
    found = evaluate(PrecisionPlan(precision="bf16", device="cpu"))
    assert found.memory_saved_ratio == pytest.approx(0.5, abs=0.05)


def test_skipped_steps_are_counted_and_explained():
    found = overflowing_evaluation()
    scales = found.planned.loss_scales
    assert scales[0] == 2.0**40 and scales[-1] == 2.0 ** (40 - found.planned.skipped_steps)
    assert found.planned.skipped_steps >= 10
    assert any("overflowed, were skipped" in note for note in found.notes)


def test_a_loss_that_becomes_nan_is_missed_and_is_null_in_json():
    class Overflow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layer(1e6 * x)
            return logits * 1e-6

    plan = PrecisionPlan(precision="fp16-autocast", device="cpu", loss_scale=2.0)
    found = evaluate(plan, Overflow())
    assert found.loss_difference_ratio is None and "loss" in found.missed
    assert any("not finite from step 1 on" in note for note in found.notes)
    document = json.loads(found.as_json())
    assert document["planned"]["losses"] == [None] * 6
    assert document["missed"] == list(found.missed)


def test_the_model_and_the_random_numbers_are_as_before():
    model, _, _ = odd_network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    evaluate(BF16, model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": {"precision": "fp32"}}, "plan: dict is not a PrecisionPlan"),
        ({"steps": 3, "warmup_steps": 3}, "steps: 3 is not a whole number from 4 up"),
        ({"warmup_steps": -1}, "warmup_steps: -1"),
        ({"learning_rate": 0}, "learning_rate: 0 is not a positive number"),
        (
            {"plan": PrecisionPlan(precision="bf16-autocast", device="cpu", keep_fp32=("nose",))},
            "keep_fp32 names 'nose', which the model does not have",
        ),
    ],
)
def test_a_wrong_argument_is_named(options, message):
    with pytest.raises(AdviceError) as caught:
        evaluate(**{"plan": BF16, **options})
    assert message in str(caught.value)
