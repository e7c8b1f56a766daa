"""The policies that change GradScalers' loss scales, in place and without reading them."""

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.catalog.guard import Action, Values
from mp_agent.probe.guard.policies.scale_floor import ScaleFloor
from mp_agent.probe.guard.policies.scale_reset import ScaleReset


class ScaleChange(NamedTuple):
    """What one policy does with a scale; 0-dim tensors on the scale's device."""

    action: Action
    is_done: torch.Tensor
    is_none_left: torch.Tensor
    """It would be done, had it not been done too often lately."""
    before: torch.Tensor
    after: torch.Tensor


class LossScales:
    """Those of one process. Each scaler is followed by itself."""

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
