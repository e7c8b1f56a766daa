"""What is trained: a model, its data, and the loss of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

STEPS = 150
BEGINS = 68
"""The step from which on what is planted at a step happens."""

OfStep = Callable[[int], float]
"""A number of the step, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Losses:
    """The loss of a step, as three who look at it see it."""

    trained: torch.Tensor
    """What backward is called on."""
    course: torch.Tensor
    """What training is to lower, above 0: of a policy, what it misses of the reward."""
    observed: torch.Tensor | None = None
    """What the script reports to the probe; None where that sees `trained` by itself."""


class Task(Protocol):
    """A model with its data, made from a seed."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        ...

    def losses(self, step: int) -> Losses:
        """Go forward with the next batch."""
        ...


def unchanged(step: int) -> float:
    """Return the factor that changes nothing."""
    return 1.0


def never(step: int) -> float:
    """Return the share of nothing."""
    return 0.0


def doubling(every: float, *, begins: int = BEGINS, times: float = 30.0) -> OfStep:
    """Return a factor that doubles every so many steps, `times` at most."""
    return lambda step: 2.0 ** min(times, max(0.0, (step - begins) / every))


def from_then_on(value: float, before: float = 0.0) -> OfStep:
    """Return what changes to a value at step `BEGINS`."""
    return lambda step: value if step >= BEGINS else before
