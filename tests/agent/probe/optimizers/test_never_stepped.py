"""What shows that an optimizer never steps: gradients that are cleared, weights that stay."""

import math

import pytest
import torch
from torch import nn

from mp_agent.probe.optimizers.roles import NeverStepped
from mp_agent.probe.scalars import Scalar
from mp_agent.records.columns import OPTIMIZER_NEVER_STEPS


class Waiting:
    """An optimizer of one parameter with a gradient, and who follows it."""

    def __init__(self, value: float = 1.0) -> None:
        self.parameter = nn.Parameter(torch.full((4, 40), value))
        self.parameter.grad = torch.ones(4, 40)
        self.optimizer = torch.optim.SGD([self.parameter])
        self.never = NeverStepped()
        self.never.clears([self.optimizer])

    def flag(self) -> Scalar | None:
        """Return what the next step of the run has."""
        scalars: dict[str, Scalar] = {}
        self.never.run_stepped(scalars)
        return scalars.get(OPTIMIZER_NEVER_STEPS)


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, -0.0])
def test_weights_that_stay_are_seen_whatever_they_are(value: float) -> None:
    assert [Waiting(value).flag() for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize(("before", "after"), [(1.0, 2.0), (math.nan, 0.0), (0.0, math.nan)])
def test_weights_that_change_are_stepped_by_something_else(before: float, after: float) -> None:
    waiting = Waiting(before)
    waiting.parameter.data.fill_(after)
    assert waiting.flag() is None
    waiting.never.clears([waiting.optimizer])
    assert waiting.flag() is None, "followed again"


def test_weights_whose_memory_is_freed_are_not_read() -> None:
    """FSDP frees what it has gathered, and torch would read there all the same."""
    waiting = Waiting()
    waiting.parameter.untyped_storage().resize_(0)
    assert waiting.flag() is None


def test_weights_that_are_no_plain_tensors_say_nothing() -> None:
    class Wrapped(torch.Tensor):
        pass

    parameter = nn.Parameter(torch.ones(4).as_subclass(Wrapped))
    parameter.grad = torch.ones(4)
    optimizer, never = torch.optim.SGD([parameter]), NeverStepped()
    never.clears([optimizer])
    scalars: dict[str, Scalar] = {}
    never.run_stepped(scalars)
    assert scalars == {}


def test_an_optimizer_whose_gradients_are_no_longer_cleared_is_forgotten() -> None:
    waiting = Waiting()
    assert [waiting.flag() for _ in range(20)] == [1.0] * 16 + [None] * 4


def test_one_that_has_stepped_is_never_followed_again() -> None:
    waiting = Waiting()
    waiting.never.stepped.add(waiting.optimizer)
    assert waiting.flag() is None
    waiting.never.clears([waiting.optimizer])
    assert waiting.flag() is None


def test_it_keeps_no_optimizer_alive() -> None:
    waiting = Waiting()
    waiting.never.stepped.add(torch.optim.SGD([waiting.parameter]))
    del waiting.optimizer
    assert waiting.flag() is None
    assert not waiting.never.waiting
    assert not waiting.never.stepped
