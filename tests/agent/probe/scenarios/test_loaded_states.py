"""A checkpoint of which nothing fits the model, and those of which something does."""

from collections.abc import Callable, Mapping
from functools import partial
from math import isnan

import pytest
import torch
from torch import Tensor, nn

from mp_agent.records.columns import NOTHING_LOADED
from tests.agent.probe.scenarios.loop_orders import classifier, loss_of, sgd

pytestmark = pytest.mark.slow

State = Mapping[str, Tensor]


def _prefixed(model: nn.Module) -> State:
    return {f"module.{name}": tensor for name, tensor in model.state_dict().items()}


def _train(model: nn.Module, steps: int = 3) -> None:
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def another_prefix() -> None:
    model = classifier()
    model.load_state_dict(strict=False, state_dict=_prefixed(model))
    _train(model)


def a_part_fits() -> None:
    model = classifier()
    model.load_state_dict({**_prefixed(model), "0.bias": model[0].bias}, strict=False)
    _train(model)


def loaded_again_without_the_prefix() -> None:
    model = classifier()
    model.load_state_dict(_prefixed(model), strict=False)
    model.load_state_dict(state_dict=model.state_dict(), strict=True)
    _train(model)


def nothing_was_given() -> None:
    model = classifier()
    model.load_state_dict({}, strict=False)
    _train(model)


def another_model() -> None:
    teacher = classifier()
    teacher.load_state_dict(_prefixed(teacher), strict=False)
    _train(classifier())


def shards_of_the_model(*, ours_first: bool) -> None:
    """Each shard is given to the whole model; one has nothing of it."""
    model = classifier()
    for fits in (ours_first, not ours_first):
        model.load_state_dict(model.state_dict() if fits else _prefixed(model), strict=False)
    _train(model)


def a_part_that_fits() -> None:
    model = classifier()
    model.load_state_dict(_prefixed(model), strict=False)
    model[0].load_state_dict(model[0].state_dict())
    _train(model)


def copied_by_hand() -> None:
    model = classifier()
    model.load_state_dict(_prefixed(model), strict=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.ones_like(parameter))
    _train(model)


def written_back_as_it_was() -> None:
    """As DistributedDataParallel does on rank 0 when it sends the weights to all."""
    model = classifier()
    model.load_state_dict(_prefixed(model), strict=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.clone())
    _train(model)


def a_backbone_within() -> None:
    model = nn.Sequential(classifier(), nn.Linear(10, 10))
    model[0].load_state_dict(_prefixed(model[0]), strict=False)
    _train(model)


def a_small_part() -> None:
    model = classifier()
    model[4].load_state_dict(_prefixed(model[4]), strict=False)
    _train(model)


@pytest.mark.parametrize(
    ("loop", "tensors"),
    [
        (another_prefix, 9.0),
        (a_part_fits, None),
        (loaded_again_without_the_prefix, None),
        (nothing_was_given, None),
        (another_model, None),
        (partial(shards_of_the_model, ours_first=True), None),
        (partial(shards_of_the_model, ours_first=False), None),
        (a_part_that_fits, None),
        (copied_by_hand, 0.0),
        (written_back_as_it_was, 9.0),
        (a_backbone_within, 9.0),
        (a_small_part, None),
    ],
)
def test_only_a_state_of_which_nothing_fits_is_recorded(
    watch, loop: Callable[[], None], tensors: float | None
):
    watched = watch()
    loop()
    watched.probe.flush()

    recorded = watched.read().column(NOTHING_LOADED)
    assert [None if isnan(each) else each for each in recorded] == [tensors, None, None]
