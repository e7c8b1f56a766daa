"""The code to paste runs, and trains as the plan is measured."""

import pytest
import torch
from torch import nn

from mp_agent.plan.execution.training import PlannedTraining, workload_of
from mp_agent.plan.precision_plan import PRECISIONS, PrecisionPlan
from mp_agent.plan.recommendation.model import code_of
from tests.agent.plan.recommendation.models import odd_network

PLANS = [
    PrecisionPlan(precision="fp32", device="cpu"),
    PrecisionPlan(precision="bf16", device="cpu", clip_norm=0.5),
    PrecisionPlan(precision="bf16-autocast", device="cpu", adam_epsilon=1e-6),
    PrecisionPlan(precision="bf16-autocast", device="cpu", keep_fp32=("3", "2")),
    PrecisionPlan(precision="bf16-autocast", device="cpu", keep_fp32=("(loss)",), clip_norm=1.0),
    PrecisionPlan(precision="fp16-autocast", device="cpu", loss_scale=1024.0, clip_norm=0.3),
    PrecisionPlan(
        precision="fp16-autocast", device="cpu", loss_scale=2.0**30, keep_fp32=("0", "(loss)")
    ),
]


def loss_of_pair(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.precision}-{plan.keep_fp32}")
def test_it_trains_exactly_as_the_plan_that_is_measured(plan, monkeypatch):
    monkeypatch.setenv("MP_AGENT_ENABLED", "false")
    names: dict[str, object] = {}
    exec(compile(code_of(plan), "pasted.py", "exec"), names)
    pasted, batch, _ = odd_network()
    measured = PlannedTraining(workload_of(pasted, batch, loss_of_pair, 1), plan, 1e-2)
    call = {name: names[name] for name in ("prepare", "make_optimizer", "train_step")}
    assert all(callable(one) for one in call.values())
    prepared = names["prepare"](pasted)  # type: ignore[operator]
    optimizer = names["make_optimizer"](prepared, 1e-2)  # type: ignore[operator]
    losses, expected = [], []
    for _ in range(4):
        inputs = measured.inputs(batch)
        arguments = (prepared, inputs, loss_of_pair, optimizer)
        losses.append(float(names["train_step"](*arguments)))  # type: ignore[operator]
        loss = measured.forward(measured.inputs(batch))
        expected.append(float(loss.detach()))
        measured.update(loss)
    assert losses == expected
    skipped = plan.loss_scale == 2.0**30
    assert (losses[1] == losses[0]) == skipped


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_compiles_for_every_precision_on_cuda(precision):
    scale = 8.0 if precision == "fp16-autocast" else None
    settings = {"thresholds": {"grad_norm_high": 500.0}}
    plan = PrecisionPlan(precision=precision, device="cuda", loss_scale=scale, settings=settings)
    code = code_of(plan)
    compile(code, "pasted.py", "exec")
    assert 'mp_agent.init(\n    thresholds={\n        "grad_norm_high": 500.0,\n    },\n)' in code
    assert ("GradScaler" in code) == (scale is not None)
