"""Evaluations in training mode, and passes without gradients that are none."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

from mp_agent.records.columns import EVALUATED_IN_TRAINING
from tests.agent.probe.scenarios.loop_orders import batch, classifier, loss_of, sgd
from tests.agent.probe.scenarios.test_loop_orders import mistakes_in
from tests.subtests import each

STEPS = 80
PERIOD_STEPS = 20
PASSES = 6

pytestmark = pytest.mark.slow

Evaluation = Callable[[nn.Module, int], object]


def train(evaluate: Evaluation, model: nn.Module | None = None, *, every: int = PERIOD_STEPS):
    """Train in epochs of `every` steps, after each of which the model is evaluated."""
    model = classifier() if model is None else model
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step % every == every - 1:
            evaluate(model, step)


def passes(model: nn.Module, step: int, count: int = PASSES) -> list[Tensor]:
    with torch.no_grad():
        return [loss_of(model, step, part) for part in range(1, count + 1)]


def with_mode(model: nn.Module, step: int, *, back: bool = True) -> None:
    model.eval()
    passes(model, step)
    model.train(back)


@torch.inference_mode()
def by_decorator(model: nn.Module, step: int) -> None:
    for part in range(1, PASSES):
        loss_of(model, step, part)


def of_another_mode(model: nn.Module, step: int) -> None:
    """Puts another model into evaluation mode than the one that it evaluates."""
    classifier().eval()
    passes(model, step)


def mode_after_the_first(model: nn.Module, step: int) -> None:
    if step < PERIOD_STEPS:
        passes(model, step)
    else:
        with_mode(model, step)


def train_from_the_beginning(evaluate: Evaluation) -> None:
    model = classifier()
    model.train()
    train(evaluate, model)


def gradient_cache() -> None:
    """Runs all parts of a batch without gradients, and then each with them."""
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        passes(model, step)
        optimizer.zero_grad()
        for part in range(PASSES):
            (loss_of(model, step, part) / PASSES).backward()
        optimizer.step()


def targets_of_its_own() -> None:
    """Learns from what it predicts, one pass without gradients before each with them."""
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(4):
            with torch.no_grad():
                classes = model(batch(step, part)[0]).argmax(1)
            cross_entropy(model(batch(step, part)[0]), classes).backward()
        optimizer.step()


def renewed_statistics(model: nn.Module, step: int) -> None:
    update_bn([batch(step, part)[0] for part in range(PASSES)], model)


def several_samples(model: nn.Module, step: int) -> None:
    model.eval()
    next(each for each in model.modules() if isinstance(each, nn.Dropout)).train()
    passes(model, step)
    model.train()


teacher = classifier()


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 10))


@each(
    "loop",
    {
        "without a mode": lambda: train(passes),
        "in a decorated function": lambda: train(by_decorator),
        "of another model": lambda: train(of_another_mode),
        "in a mode that is set at first": lambda: train_from_the_beginning(passes),
        "in the mode that the evaluation leaves": lambda: train(
            lambda model, step: passes(model.train(), step)
        ),
        "of a compiled model": lambda: train(
            passes, cast(nn.Module, torch.compile(classifier(), backend="eager", dynamic=False))
        ),
    }.items(),
)
def test_an_evaluation_in_training_mode_is_found(watch, loop):
    assert _recorded(watch, loop[1]) == {EVALUATED_IN_TRAINING}


@each(
    "loop",
    {
        "in evaluation mode": lambda: train(with_mode),
        "in evaluation mode after the first": lambda: train(mode_after_the_first),
        "of a model that has no mode": lambda: train(passes, plain()),
        "a few passes, as for a picture": lambda: train(lambda model, step: passes(model, step, 3)),
        "with gradients": lambda: train(
            lambda model, step: [loss_of(model, step, part) for part in range(PASSES)]
        ),
        "of a teacher": lambda: train(lambda _, step: passes(teacher, step)),
        "with dropout alone, for several samples": lambda: train(several_samples),
        "for the statistics of weights": lambda: train(renewed_statistics),
        "a gradient cache": gradient_cache,
        "targets of its own": targets_of_its_own,
        "before every few steps": lambda: train(passes, every=4),
    }.items(),
)
def test_other_passes_without_gradients_are_left_alone(watch, loop):
    assert _recorded(watch, loop[1]) == set()


def _recorded(watch, loop: Callable[[], object]) -> set[str]:
    torch.manual_seed(0)
    watched = watch()
    loop()
    watched.probe.flush()
    found = mistakes_in(watched.read(one_schema=False))
    return found
