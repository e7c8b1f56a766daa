"""accelerate's accumulation of gradients, and the ways around it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.records.columns import ACCUMULATION_BYPASSED
from tests.agent.probe.conftest import Watch
from tests.agent.probe.scenarios.test_loop_orders import mistakes_in
from tests.subtests import each

pytestmark = [pytest.mark.slow, pytest.mark.long]

PARTS, SIZE = 4, 8
STEPS = int(DEFAULTS["loop_mistake_steps"]) + 8


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1))


def train(
    *,
    accumulates: bool = True,
    prepares: bool = True,
    wrapped: bool = True,
    batches: int = PARTS * STEPS,
    with_data: bool = True,
    networks: int = 1,
    passes: int = 1,
) -> None:
    """Train on micro-batches: `networks` of them in turn, each by its own optimizer.

    wrapped: the optimizer that `prepare` returns is stepped, not the one within it. passes:
    backwards per micro-batch.
    """
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=PARTS, sync_with_dataloader=with_data)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    models = [network() for _ in range(networks)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in models]
    data = DataLoader(TensorDataset(torch.randn(batches, SIZE)))
    models = [accelerator.prepare(each) for each in models]
    if prepares:
        optimizers = [accelerator.prepare(each) for each in optimizers]
    data = accelerator.prepare(data)
    stepped = optimizers if wrapped else [vars(each)["optimizer"] for each in optimizers]
    for _ in range(-(-PARTS * STEPS // batches)):
        for (inputs,) in data:
            within: AbstractContextManager[None] = nullcontext()
            if accumulates:
                within = accelerator.accumulate(*models)
            with within:
                for model, optimizer in zip(models, stepped, strict=True):
                    for _ in range(passes):
                        accelerator.backward(model(inputs).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()


def train_next_to_another() -> None:
    """Step a model that accelerate does not know of, at each micro-batch of one that it does."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    model, other = network(), network()
    first = torch.optim.AdamW(model.parameters(), lr=1e-3)
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    model, first = accelerator.prepare(model, first)
    for _ in range(PARTS * STEPS):
        other(torch.randn(4, SIZE)).square().mean().backward()
        second.step()
        second.zero_grad()
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, SIZE)).square().mean())
            first.step()
            first.zero_grad()


WRONG: dict[str, Callable[[], None]] = {
    "outside of accumulate": lambda: train(accumulates=False),
    "an optimizer that is not prepared": lambda: train(prepares=False),
    "the optimizer within the prepared one": lambda: train(wrapped=False),
    "two networks, outside of accumulate": lambda: train(accumulates=False, networks=2),
    "outside of accumulate, short passes over the data": lambda: train(
        accumulates=False, batches=PARTS + 1
    ),
}
HEALTHY: dict[str, Callable[[], None]] = {
    "accumulate": train,
    "two networks": lambda: train(networks=2),
    "a model that accelerate does not know of": train_next_to_another,
    "two backwards per micro-batch": lambda: train(passes=2),
    "data that end before a step is complete": lambda: train(batches=PARTS - 1),
    "data that end within the second step": lambda: train(batches=PARTS + 1),
    "steps that the end of the data does not cut short": lambda: train(
        batches=PARTS + 1, with_data=False
    ),
}


@pytest.fixture
def recorded(tmp_path) -> Callable[[Callable[[], None]], set[str]]:
    from accelerate.state import AcceleratorState, GradientState

    rings = count()

    def run(loop: Callable[[], None]) -> set[str]:
        torch.manual_seed(0)
        watched = Watch(tmp_path / str(next(rings)) / "rank0.ring")
        try:
            loop()
            watched.probe.flush()
            return mistakes_in(watched.read(one_schema=False))
        finally:
            watched.close()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()

    return run


@each("name", WRONG)
def test_a_step_before_all_micro_batches_are_added_up_is_recorded(recorded, name):
    assert recorded(WRONG[name]) == {ACCUMULATION_BYPASSED}


@each("name", HEALTHY)
def test_accumulation_as_accelerate_means_it_shows_no_mistake(recorded, name):
    assert recorded(HEALTHY[name]) == set()
