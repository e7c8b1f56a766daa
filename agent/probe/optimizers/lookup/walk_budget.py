"""Walks over all live objects, limited to a share of the time, and what earlier ones have found."""

import weakref
from collections.abc import Iterable
from time import perf_counter
from typing import TypeVar

import torch

from mp_agent.probe.optimizers.lookup import live_objects
from mp_agent.probe.optimizers.lookup.live_objects import LiveObjects

WALKS_FREE = 3
"""Walks over all live objects that are made whatever their cost."""
WALK_SHARE = 0.005
"""Share of the time since the first walk that further ones may take."""

T = TypeVar("T")


class WalkBudget:
    """Keeps walks over all live objects within a share of the time."""

    def __init__(self) -> None:
        self._began_seconds: float | None = None
        self._walks = 0
        self._seconds = 0.0
        self._known = KnownObjects()
        self.complete = False
        """Whether the last walk was over all live objects."""

    @property
    def left(self) -> bool:
        """Whether another walk over all of them is within the budget."""
        if self._began_seconds is None or self._walks < WALKS_FREE:
            return True
        return self._seconds < WALK_SHARE * (perf_counter() - self._began_seconds)

    def walk(self, *, whole: bool = False) -> LiveObjects:
        """Walk over all live objects; beyond the budget, over the young and the known ones.

        What was made since the last walk over all, and is young no longer, is then not found.
        whole: walk over all, whatever the budget.
        """
        self.complete = whole or self.left
        begin_seconds = perf_counter()
        if self._began_seconds is None:
            self._began_seconds = begin_seconds
        live = live_objects.walk(young=not self.complete)
        if self.complete:
            self._known.note(live)
        else:
            live = self._known.joined(live)
        self._walks += 1
        self._seconds += perf_counter() - begin_seconds
        return live


class KnownObjects:
    """Modules and optimizers of earlier walks, as long as they live. Keeps none of them alive."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def note(self, live: LiveObjects) -> None:
        """Remember what a walk over all objects has found, in place of what was known."""
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
