"""Policies on the loss scale: set back after a collapse, and kept above a floor."""

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.catalog.guard import Action, Values
from mp_agent.probe.guard.verdict import ActionBudget


class ScaleFloor:
    """A loss scale that has fallen below `floor` is raised to it. Scales are equal on all ranks."""

    def __init__(self, values: Values) -> None:
        self.floor = float(values["floor"])
        self._values = values
        self._budget: ActionBudget | None = None

    def observe(self, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether `scale` is to be raised, and whether no action is left (0-dim bool)."""
        if self._budget is None:
            actions_max, window_steps = self._values["actions_max"], self._values["window_steps"]
            self._budget = ActionBudget(float(actions_max), float(window_steps), scale.device)
        low = (scale < self.floor).reshape(())
        raised = self._budget.grant(low)
        return raised, low & ~raised


class ScaleReset:
    """Follows one scale, by what all ranks know of it, and says when and to what it is set back.

    GradScaler doubles a scale once per growth interval, by default 2000 updates: from 2^4 back to
    2^16 in 24 000 updates, in which small gradients are 0 in FP16.
    """

    def __init__(self, values: Values, device: torch.device) -> None:
        self._fall_factor = float(values["fall_factor"])
        self._calm_steps = int(values["calm_steps"])
        self._budget = ActionBudget(
            float(values["actions_max"]), float(values["window_steps"]), device
        )
        self._held = torch.zeros((), dtype=torch.float64, device=device)
        """The last scale that held for `calm_steps`; 0 where none has since the last reset."""
        self._lowest = torch.full_like(self._held, torch.inf)
        """The lowest scale of the updates that `_calm` counts."""
        self._calm = torch.zeros_like(self._held)

    def observe(
        self, scale: torch.Tensor, is_trouble: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add an update that was made with `scale`, above 0; return what follows (all 0-dim).

        Returns whether the scale is to be set back (bool), to what (float64), and whether it were
        but for the limit on actions (bool). A scale that is set back has to hold again before the
        next reset: one that overflows at once is forgotten, and a lower one takes its place. A
        scale that falls in smaller parts, and holds in between, is followed down.
        """
        self._calm = torch.where(is_trouble, 0.0, self._calm + 1.0)
        self._lowest = torch.where(is_trouble, torch.inf, torch.minimum(self._lowest, scale))
        is_calm = self._calm >= self._calm_steps
        has_fallen = is_calm & (scale * self._fall_factor <= self._held)
        is_reset, level = self._budget.grant(has_fallen), self._held
        self._held = torch.where(is_calm, self._lowest, self._held)
        self._held = torch.where(is_reset, 0.0, self._held)
        self._calm = torch.where(is_calm, 0.0, self._calm)
        self._lowest = torch.where(is_calm, torch.inf, self._lowest)
        return is_reset, level, has_fallen & ~is_reset


class ScaleChange(NamedTuple):
    """What one policy does with a scale; 0-dim tensors on the scale's device."""

    action: Action
    is_done: torch.Tensor
    is_none_left: torch.Tensor
    """It would be done, had it not been done too often lately."""
    before: torch.Tensor
    after: torch.Tensor


class LossScales:
    """Those of one process. Each scaler is followed separately."""

    def __init__(self, policies: Mapping[str, Values], *, dry_run: bool) -> None:
        self._dry_run = dry_run
        floor = policies.get("raise_loss_scale")
        self._floor = None if floor is None else ScaleFloor(floor)
        self._reset_values = policies.get("reset_loss_scale")
        self._resets: weakref.WeakKeyDictionary[GradScaler, ScaleReset] = (
            weakref.WeakKeyDictionary()
        )
        self._seen: weakref.WeakKeyDictionary[GradScaler, tuple[torch.Tensor, torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )

    def observe(self, scaler: GradScaler, agreed: torch.Tensor, is_trouble: torch.Tensor) -> None:
        """Add an update of one of the scaler's optimizers; 0-dim tensors, the same on all ranks.

        agreed: the scale of its gradients; the mean of the ranks' where they differ.
        """
        if self._reset_values is None:
            return
        before = self._seen.get(scaler)
        troubled = is_trouble if before is None else is_trouble | before[1].to(is_trouble.device)
        self._seen[scaler] = (agreed, troubled)

    def updated(self, scaler: GradScaler) -> list[ScaleChange]:
        """Change the scale that `scaler` has adapted; return by which policies, done or not."""
        scale: torch.Tensor | None = scaler._get_scale_async()
        if scale is None:
            return []
        changes = []
        if (seen := self._seen.pop(scaler, None)) is not None:
            changes.append(self._reset(scaler, scale, *seen))
        if self._floor is not None:
            raised, none_left = self._floor.observe(scale)
            level = torch.full_like(scale, self._floor.floor)
            changes.append(self._changed(Action.RAISE_LOSS_SCALE, scale, level, raised, none_left))
        return changes

    def _reset(
        self, scaler: GradScaler, scale: torch.Tensor, agreed: torch.Tensor, troubled: torch.Tensor
    ) -> ScaleChange:
        if scaler not in self._resets:
            assert self._reset_values is not None
            self._resets[scaler] = ScaleReset(self._reset_values, scale.device)
        is_reset, level, none_left = self._resets[scaler].observe(
            agreed.to(scale.device), troubled.to(scale.device)
        )
        return self._changed(Action.RESET_LOSS_SCALE, scale, level, is_reset, none_left)

    def _changed(
        self,
        action: Action,
        scale: torch.Tensor,
        level: torch.Tensor,
        is_done: torch.Tensor,
        is_none_left: torch.Tensor,
    ) -> ScaleChange:
        """Set the scale to `level` where that is to be done, but for a dry run."""
        before = scale.clone()
        after = torch.where(is_done, level.to(scale.dtype), before)
        if not self._dry_run:
            scale.copy_(after)
        return ScaleChange(action, is_done, is_none_left, before, after)


def follow_skip(scaler: GradScaler, optimizer: Optimizer, is_skipped: torch.Tensor) -> None:
    """Have `scaler` lower its scale as the scaler of the rank does that skips the update (0-dim).

    Gradients that ranks average have to be multiplied by one scale.
    """
    found_infs = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for found_inf in found_infs.values():
        found_inf.copy_(torch.maximum(found_inf, is_skipped.to(found_inf)))
