"""The hooks on Megatron-Core: put on its classes once they are there, and taken away again."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.probe.hooks import megatron
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation import Shield


class Events:
    """Notes the names of the events, in their order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.losses: list[object] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.seen.append(name)

    def engine_backward_begins(self, loss: object) -> None:
        self.losses.append(loss)


def optimizers() -> Any:
    """A module as Megatron's of its optimizers: chains step, or prepare and step, their parts."""
    module: Any = ModuleType("megatron.core.optimizer.optimizer")

    class MegatronOptimizer:
        raises = finds_inf = False

        def step(self):
            return not self.prepare_grads() and self.step_with_ready_grads(), 1.0, None

        def prepare_grads(self):
            return self.finds_inf

        def step_with_ready_grads(self):
            if self.raises:
                raise ValueError("in the middle of a step")
            return True

    class ChainedOptimizer(MegatronOptimizer):
        def step(self):
            return super().step()

    module.MegatronOptimizer, module.ChainedOptimizer = MegatronOptimizer, ChainedOptimizer
    return module


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def patches(events):
    patches = Patches()
    shield = Shield(on_failure=lambda: pytest.fail("the probe failed"))
    megatron.install(patches, events, shield)
    yield patches
    patches.restore()


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


class TestLook:
    def test_nothing_is_imported(self, patches):
        assert not any(name.startswith("megatron.core") for name in sys.modules)

    def test_a_module_imported_later_is_hooked_when_an_optimizer_is_made(
        self, patches, events, monkeypatch
    ):
        module = optimizers()
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.MegatronOptimizer().step()
        assert events.seen == []
        make_optimizer()
        module.MegatronOptimizer().step()
        assert events.seen == ["engine_step_begins", "engine_step_ended"]

    def test_a_module_that_is_still_being_imported_is_left_for_later(self, patches, monkeypatch):
        module: Any = optimizers()
        whole = module.ChainedOptimizer
        del module.ChainedOptimizer
        monkeypatch.setitem(sys.modules, module.__name__, module)
        step = module.MegatronOptimizer.step
        make_optimizer()
        assert module.MegatronOptimizer.step is step
        module.ChainedOptimizer = whole
        make_optimizer()
        assert module.MegatronOptimizer.step is not step

    def test_all_is_restored(self, patches, monkeypatch):
        module: Any = optimizers()
        before = dict(vars(module.MegatronOptimizer)), torch.optim.Optimizer.__init__
        monkeypatch.setitem(sys.modules, module.__name__, module)
        make_optimizer()
        patches.restore()
        assert vars(module.MegatronOptimizer)["step"] is before[0]["step"]
        assert "__init_subclass__" not in vars(module.MegatronOptimizer)


class TestStep:
    @pytest.fixture
    def module(self, patches, monkeypatch) -> Any:
        module = optimizers()
        monkeypatch.setitem(sys.modules, module.__name__, module)
        make_optimizer()
        return module

    def test_the_outermost_of_a_chain_is_the_step(self, module, events):
        assert module.ChainedOptimizer().step() == (True, 1.0, None)
        assert events.seen == ["engine_step_begins", "engine_step_ended"]

    def test_a_class_derived_later_is_hooked(self, module, events):
        class LayerWise(module.ChainedOptimizer):  # type: ignore[misc, name-defined]
            def step(self):
                return super().step()

        LayerWise().step()
        assert events.seen == ["engine_step_begins", "engine_step_ended"]

    def test_one_that_raises_was_none(self, module, events):
        optimizer = module.ChainedOptimizer()
        optimizer.raises = True
        with pytest.raises(ValueError, match="in the middle"):
            optimizer.step()
        assert events.seen == ["engine_step_begins", "engine_step_raised"]
        optimizer.raises = False
        optimizer.step()
        assert events.seen[2:] == ["engine_step_begins", "engine_step_ended"]

    def test_its_parts_called_by_themselves_are_one(self, module, events):
        optimizer = module.ChainedOptimizer()
        optimizer.prepare_grads()
        assert events.seen == ["engine_step_begins"]
        optimizer.step_with_ready_grads()
        assert events.seen == ["engine_step_begins", "engine_step_ended"]

    def test_nonfinite_gradients_end_it_where_it_is_only_prepared(self, module, events):
        optimizer = module.MegatronOptimizer()
        optimizer.finds_inf = True
        assert optimizer.prepare_grads()
        assert events.seen == ["engine_step_begins", "engine_step_ended"]


class TestSchedule:
    @pytest.fixture
    def module(self, patches, monkeypatch) -> Any:
        module: Any = ModuleType("megatron.core.pipeline_parallel.schedules")

        def forward_step(output):
            return output, 1

        def backward_step(inputs, output, gradient):
            return output

        module.forward_step, module.backward_step = forward_step, backward_step
        module.custom_backward = lambda output, gradient: None
        module.forward_backward_pipelining_without_interleaving = None
        monkeypatch.setitem(sys.modules, module.__name__, module)
        make_optimizer()
        return module

    def test_a_loss_that_is_freed_before_its_backward_is_as_it_was(self, module, events):
        loss = torch.tensor(2.5, requires_grad=True) * 1.0
        module.forward_step([loss])
        loss.data = torch.tensor([1e9])
        module.backward_step(None, [loss], [None])
        assert events.losses == [2.5]

    def test_an_output_that_gets_its_gradient_from_a_later_stage_is_no_loss(self, module, events):
        output = torch.ones(1, requires_grad=True) * 1.0
        module.forward_step(output)
        module.backward_step(None, output, torch.ones(1))
        assert events.losses == []
