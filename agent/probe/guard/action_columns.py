"""What the guard does, in the columns of the step in which it does it."""

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from mp_agent.catalog.guard import DRY_RUN, POLICIES_BY_NAME, Action
from mp_agent.probe.optimizers.watched import Role
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.tracker.context import TrackerContext


class ActionColumns:
    """The columns of the actions that `policies` may take; those of others stay absent."""

    def __init__(self, policies: Iterable[str], context: TrackerContext, *, dry_run: bool) -> None:
        own = {POLICIES_BY_NAME[name].action for name in policies}
        self._columns = tuple(action.column for action in {*own, Action.NONE_LEFT})
        self._context = context
        self._weight = DRY_RUN if dry_run else 1.0

    def of(self, optimizer: Optimizer) -> dict[str, Scalar]:
        """Return the scalars of the step that the update is a part of, with 0 for each action."""
        scalars = self._scalars_of(optimizer)
        for column in self._columns:
            scalars.setdefault(column, 0.0)
        return scalars

    def note(
        self, scalars: dict[str, Scalar], action: Action, is_done: torch.Tensor | bool
    ) -> None:
        """Record whether something is done, for any optimizer; on a device it is not known here."""
        if action.column not in self._columns:
            return
        done = float(is_done) if isinstance(is_done, bool) else scalar_of(is_done)
        before = scalars.get(action.column, 0.0)
        if isinstance(done, torch.Tensor):
            value = done.to(torch.float64) * self._weight
            if isinstance(before, torch.Tensor):
                value = torch.maximum(value, before)
            if isinstance(before, torch.Tensor) or not before:
                scalars[action.column] = value
        elif done:
            scalars[action.column] = self._weight

    def _scalars_of(self, optimizer: Optimizer) -> dict[str, Scalar]:
        watched = self._context.registry.of(optimizer)
        if watched is None or watched.role is Role.SEPARATE:
            return {} if watched is None else watched.scalars
        return self._context.boundaries.of(watched).scalars
