"""The modules and optimizers that were found among the live objects, for looks that find fewer."""

import weakref
from collections.abc import Iterable
from typing import TypeVar

import torch

from mp_agent.probe.optimizers.live_objects import LiveObjects

T = TypeVar("T")


class SeenObjects:
    """Objects of earlier looks, as long as they live. Keeps none of them alive."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def note(self, live: LiveObjects) -> None:
        """Remember what a look at all objects has found, in place of what was known."""
        self._modules = list(map(weakref.ref, live.modules))
        self._optimizers = list(map(weakref.ref, live.optimizers))

    def joined(self, live: LiveObjects) -> LiveObjects:
        """Return what is known and still lives, followed by what is new in `live`."""
        return LiveObjects(
            modules=distinct([*alive(self._modules), *live.modules]),
            optimizers=distinct([*alive(self._optimizers), *live.optimizers]),
        )


def alive(references: Iterable["weakref.ref[T]"]) -> list[T]:
    """Return those of the objects that still exist."""
    return [each for reference in references if (each := reference()) is not None]


def distinct(objects: Iterable[T]) -> tuple[T, ...]:
    """Return each object once, in order. Compares none: their classes may define equality."""
    return tuple({id(each): each for each in objects}.values())
