"""What is not known to be right of Megatron-Core is named, not measured."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from mp_agent.probe.engines.megatron import FULLY_SHARDED, UNKNOWN_LAYOUT, make_plan


class Optimizer:
    """Of Megatron's optimizers what a plan is made of."""

    def __init__(self, parameters: list[nn.Parameter], **attributes: Any) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        vars(self).update(attributes)


def test_its_own_fsdp_is_not_measured():
    sharded = SimpleNamespace(use_megatron_fsdp=True)
    optimizer = Optimizer([nn.Parameter(torch.ones(2))], ddp_config=sharded)
    plan = make_plan(optimizer, "")
    assert (plan.layers, plan.unsupported) == ((), (FULLY_SHARDED,))
    assert plan.strategy == "megatron_fsdp"


def test_groups_that_are_kept_otherwise_are_not_measured():
    optimizer = Optimizer([nn.Parameter(torch.ones(2))], model_float16_groups=None)
    plan = make_plan(optimizer, "")
    assert (plan.layers, plan.unsupported) == ((), (UNKNOWN_LAYOUT,))


def test_gradients_that_are_gone_are_noted():
    weight = nn.Parameter(torch.ones(2))
    optimizer = Optimizer([weight])
    plan = make_plan(optimizer, "")
    noted: list[str] = []
    weight.grad = torch.ones(2)
    assert plan.gradients(noted.append) == [weight.grad]
    del optimizer.optimizer
    assert plan.gradients(noted.append) == [None]
    assert noted == [UNKNOWN_LAYOUT]


def test_a_copy_that_another_stage_counts_is_left_out():
    weight, copy = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    copy.shared = True  # type: ignore[attr-defined]
    assert len(make_plan(Optimizer([weight, copy]), "").layers) == 1


def test_main_gradients_come_before_others():
    weight = nn.Parameter(torch.ones(2))
    weight.grad, weight.main_grad = torch.ones(2), torch.full((2,), 3.0)  # type: ignore[attr-defined]
    optimizer = Optimizer([weight])
    (found,) = make_plan(optimizer, "").gradients(lambda feature: None)
    assert found is not None and found.tolist() == [3.0, 3.0]
