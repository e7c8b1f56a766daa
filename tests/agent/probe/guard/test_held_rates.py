"""Learning rates that jump are held before the update; those of schedules are left alone."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    StepLR,
)

from mp_agent.catalog.guard import POLICIES_BY_NAME
from mp_agent.probe.guard.update import HeldRates
from tests.agent.probe.small_model import make_loss, make_model
from tests.subtests import each

DEFAULTS = POLICIES_BY_NAME["hold_learning_rate"].defaults
STEPS = 200
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "linear warm-up from 0": lambda o: LambdaLR(o, lambda step: min(1.0, step / 100)),
    "constant warm-up at a thousandth": lambda o: ConstantLR(o, factor=0.001, total_iters=50),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 40),
    "one cycle": lambda o: OneCycleLR(o, max_lr=1.0, total_steps=STEPS, div_factor=1e4),
    "cycles": lambda o: CyclicLR(o, 1e-6, 1.0, 1, cycle_momentum=False),
    "steps down and a restart": lambda o: LambdaLR(o, lambda step: 0.01 ** (step // 50 % 2)),
    "steps": lambda o: StepLR(o, 10),
    "search for a rate": lambda o: LambdaLR(o, lambda step: 1e-6 * 1.1**step),
}


def made(rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate, momentum=0.9)


def limits(optimizer: torch.optim.Optimizer, held: HeldRates, rate: float) -> dict[int, float]:
    optimizer.param_groups[0]["lr"] = rate
    held.look(optimizer)
    return held.limits


@each("name", SCHEDULES)
def test_no_rate_of_a_schedule_is_held(name):
    optimizer, held = made(), HeldRates(DEFAULTS)
    scheduler = SCHEDULES[name](optimizer)
    for _ in range(STEPS - 1):
        held.look(optimizer)
        assert not held.limits and not held.is_none_left
        optimizer.step()
        scheduler.step()


def test_a_warm_up_by_hand_and_a_tenfold_rate_are_not_held():
    optimizer, held = made(), HeldRates(DEFAULTS)
    for step in range(STEPS):
        assert not limits(optimizer, held, 1e-3 * min(1.0, (step + 1) / 1000))
    assert not limits(optimizer, held, 1e-2 * STEPS / 1000)


def test_a_jump_is_held_at_the_highest_rate_before_while_it_lasts():
    optimizer, held = made(), HeldRates(DEFAULTS)
    for rate in (*[0.05] * 15, *[0.1] * 15):
        assert not limits(optimizer, held, rate)
    for _ in range(6):
        assert limits(optimizer, held, 40.0) == {0: 0.1}
    assert not limits(optimizer, held, 0.1)
    assert limits(optimizer, held, float("inf")) == {0: 0.1}


def test_a_rate_that_is_nan_is_held_once_there_was_another():
    optimizer, held = made(), HeldRates(DEFAULTS)
    assert not limits(optimizer, held, float("nan"))
    for _ in range(20):
        assert not limits(optimizer, held, 0.1)
    assert limits(optimizer, held, float("nan")) == {0: 0.1}
    optimizer.param_groups[0]["lr"] = torch.tensor(float("nan"))
    held.look(optimizer)
    assert held.limits == {0: 0.1}
    assert limits(optimizer, held, 40.0) == {0: 0.1}


def test_a_jump_above_what_a_schedule_says_is_held():
    optimizer, held = made(), HeldRates(DEFAULTS)
    LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(30):
        assert not limits(optimizer, held, 0.001)
    assert not limits(optimizer, held, 0.1)
    assert limits(optimizer, held, 40.0) == {0: 0.1}


def test_a_rate_that_lasts_is_let_through_and_is_then_usual():
    optimizer, held = made(), HeldRates({**DEFAULTS, "actions_max": 5.0})
    for _ in range(30):
        limits(optimizer, held, 0.1)
    assert all(limits(optimizer, held, 40.0) for _ in range(5))
    assert not limits(optimizer, held, 40.0) and held.is_none_left
    assert not limits(optimizer, held, 40.0) and not held.is_none_left


def test_nothing_is_held_before_enough_updates_nor_in_a_new_group():
    optimizer, held = made(), HeldRates(DEFAULTS)
    for _ in range(19):
        limits(optimizer, held, 0.1)
    assert not limits(optimizer, held, 40.0)
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 1e6})
    held.look(optimizer)
    assert not held.limits


@pytest.mark.parametrize("as_tensor", [False, True])
def test_six_steps_at_400_times_the_rate_move_the_weights_as_the_rate_before(watch, as_tensor):
    model = make_model()
    rate = torch.tensor(0.01) if as_tensor else 0.01
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    started = watch(guard={"hold_learning_rate": {}, "request_checkpoint": {}})
    moved, asked = train(model, optimizer, rate, started.probe.requests.take_checkpoint)
    assert max(moved[25:31]) < 2.0 * max(moved[:25])
    assert asked == [27]
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
    started.probe.flush()
    contents = started.read()
    place = contents.schema.step_columns.index("guard_hold_learning_rate")
    held = [float(record.values[place]) for record in contents.records]
    assert held == [0.0] * 25 + [1.0] * 6 + [0.0] * 4


def test_without_the_policy_the_same_jump_moves_them_far():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    moved, _ = train(model, optimizer, 0.01, bool)
    assert max(moved[25:31]) > 100.0 * max(moved[:25])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rate: float | torch.Tensor,
    take_checkpoint: Callable[[], bool],
) -> tuple[list[float], list[int]]:
    """Return the largest change of a weight in each step, and where a checkpoint was asked for."""
    weights, asked = [], []
    for step in range(35):
        optimizer.param_groups[0]["lr"] = rate * (400 if 25 <= step < 31 else 1)
        optimizer.zero_grad()
        make_loss(model, step).backward()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        optimizer.step()
        asked += [step] if take_checkpoint() else []
    weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return [float((b - a).abs().max()) for a, b in pairwise(weights)], asked
