"""What is not known to be right of Megatron-Core is named, not measured."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.probe.engines.megatron import (
    FULLY_SHARDED,
    UNKNOWN_LAYOUT,
    DataParallelReducers,
    make_plan,
)
from mp_agent.probe.engines.megatron_gradients import BegunReductions
from mp_agent.probe.optimizers.engine import unheld_by_engines


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


class TestUnheldParameters:
    @pytest.fixture
    def model(self) -> Any:
        model: Any = nn.Linear(2, 2)
        for parameter in model.parameters():
            parameter.main_grad = torch.ones_like(parameter)
        return model

    def test_have_their_gradient_in_a_buffer(self, model):
        optimizer = Optimizer([model.weight])
        ((name, found),) = unheld_by_engines([make_plan(optimizer, "")])
        assert (name, found is model.bias) == ("bias", True)

    def test_are_none_that_another_engine_steps_or_that_are_frozen(self, model):
        optimizers = [Optimizer([model.weight]), Optimizer([model.bias])]
        assert unheld_by_engines([make_plan(each, "") for each in optimizers]) == []
        model.bias.requires_grad = False
        assert unheld_by_engines([make_plan(optimizers[0], "")]) == []

    def test_are_not_known_of_an_engine_that_is_not_measured(self, model):
        optimizer = Optimizer([model.weight], model_float16_groups=None)
        assert unheld_by_engines([make_plan(optimizer, "")]) == []


class Group:
    """Stands for a group of buckets."""


class TestReductionOfSlices:
    @pytest.fixture
    def begun(self) -> BegunReductions:
        begun = BegunReductions()
        begun.follow(Group)
        return begun

    def test_is_missing_until_all_groups_have_begun_since_the_last_step(self, begun):
        groups = [Group(), Group()]
        reducers = DataParallelReducers(copied=False, apart=groups, begun=begun)
        begun.add(groups[0])
        assert reducers.reduced() is False
        begun.add(groups[1])
        assert reducers.reduced() is None
        begun.clear()
        assert reducers.reduced() is False

    def test_is_not_known_of_groups_that_do_not_say_or_that_are_gone(self, begun):
        class Other(Group):
            """Of another library."""

        others = [Other()]
        assert DataParallelReducers(copied=False, apart=others, begun=begun).reduced() is None
        groups = [Group()]
        reducers = DataParallelReducers(copied=False, apart=groups, begun=begun)
        groups.clear()
        assert reducers.reduced() is None
        assert DataParallelReducers(copied=False, apart=others).reduced() is None
