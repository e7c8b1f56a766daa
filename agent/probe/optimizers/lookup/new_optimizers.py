"""Optimizers that are not watched yet, of which some may train a part of the run's model."""

import weakref
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.optimizers.lookup.live_objects import LiveObjects
from mp_agent.probe.optimizers.lookup.module_trees import holds_any
from mp_agent.probe.optimizers.lookup.optimizer_parameters import (
    has_gradient,
    holders,
    optimizer_parameters,
    trains_part_of,
)
from mp_agent.probe.optimizers.lookup.walk_budget import alive, distinct

_MADE_AT_MOST = 256


class NewOptimizers:
    """The latest optimizers. Keeps none of them alive.

    candidates_at_most: how many are remembered that may train a part of the run's model.
    """

    def __init__(self, candidates_at_most: int) -> None:
        self._candidates_at_most = candidates_at_most
        self._candidates: list[weakref.ref[Optimizer]] = []
        """Those that may train a part of the run's model."""
        self._unexamined: list[weakref.ref[Optimizer]] = []
        """Those made since the first one's plan, of this model or of any other."""
        self._made: list[weakref.ref[Optimizer]] = []
        """The latest, for a clipping of parameters that none of the watched ones holds."""

    def add(self, optimizer: Optimizer, *, candidate: bool) -> None:
        """Record a new optimizer."""
        reference = weakref.ref(optimizer)
        self._made = [*self._made, reference][-_MADE_AT_MOST:]
        if candidate:
            self._unexamined = [*self._unexamined, reference][-self._candidates_at_most :]

    def find_candidates(
        self,
        optimizer: Optimizer,
        root: nn.Module | None,
        live: LiveObjects,
        identities: Collection[int],
    ) -> None:
        """Choose those that may train what the first optimizer leaves of its model.

        optimizer: the first one, of the module tree `root` and the parameters `identities`. Those
        known of stay known: beyond the budget of walks, not all that live are found.
        """
        known = distinct([*reversed(alive(self._made)), *live.optimizers])
        others = [each for each in reversed(known) if each is not optimizer]
        self._candidates = [
            weakref.ref(each)
            for each in others
            if root is None or trains_part_of(each, root, identities)
        ][-self._candidates_at_most :]
        self._unexamined = []
        self._made = list(map(weakref.ref, others[-_MADE_AT_MOST:]))

    def all(self) -> list[Optimizer]:
        """Return those that still exist."""
        return alive([*self._made, *self._candidates, *self._unexamined])

    @property
    def any_candidates(self) -> bool:
        """Whether any may still train a part of the run's model."""
        return bool(self._candidates or self._unexamined)

    @property
    def any_made(self) -> bool:
        """Whether any of the latest still exists."""
        return any(reference() is not None for reference in self._made)

    def any_has_gradient(self) -> bool:
        """Return whether any of the latest has gradients to step with."""
        return any(map(has_gradient, alive(self._made)))

    def pop_ready(
        self, watched: Iterable[Optimizer | None], root: nn.Module | None
    ) -> list[Optimizer]:
        """Remove and return the candidates that have gradients and are not `watched` already.

        root: the run's model. Gradients of another one, which another thread may be training, are
        not read.
        """
        known = {id(each) for each in watched if each is not None}
        self._candidates += [
            weakref.ref(each)
            for each in alive(self._unexamined)
            if root is None or holds_any(root, optimizer_parameters(each))
        ]
        self._unexamined = []
        new = [each for each in alive(self._candidates) if id(each) not in known]
        ready = {id(each) for each in new if has_gradient(each)}
        waiting = [weakref.ref(each) for each in new if id(each) not in ready]
        self._candidates = waiting[-self._candidates_at_most :]
        return [each for each in new if id(each) in ready]

    def pop_holders(self, parameters: Sequence[torch.Tensor]) -> list[Optimizer]:
        """Remove and return those that hold any of `parameters`; if none does, forget all."""
        if not self._made:
            return []
        made = alive(self._made)
        found = holders(made, parameters)
        left = [each for each in made if each not in found] if found else []
        self._made = list(map(weakref.ref, left))
        return found
