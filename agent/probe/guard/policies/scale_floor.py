"""Keeps GradScaler's loss scale above a floor, on the scale's own device."""

import torch
from torch.amp import GradScaler

from mp_agent.catalog.guard import Values
from mp_agent.probe.guard.decision.action_budget import ActionBudget


class ScaleFloor:
    """Raises a loss scale that has fallen below `floor`. Scales are equal on all ranks."""

    def __init__(self, values: Values, *, dry_run: bool) -> None:
        self._values = values
        self._floor = float(values["floor"])
        self._dry_run = dry_run
        self._budget: ActionBudget | None = None

    def updated(self, scaler: GradScaler) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return whether the scale was raised, and whether there was no action left (0-dim bool).

        None where there is no scale yet.
        """
        scale: torch.Tensor | None = scaler._get_scale_async()
        if scale is None:
            return None
        if self._budget is None:
            actions_max, window_steps = self._values["actions_max"], self._values["window_steps"]
            self._budget = ActionBudget(float(actions_max), float(window_steps), scale.device)
        low = (scale < self._floor).reshape(())
        raised = self._budget.grant(low)
        if not self._dry_run:
            scale.copy_(torch.where(raised, torch.full_like(scale, self._floor), scale))
        return raised, low & ~raised
