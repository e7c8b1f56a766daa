"""Sets GradScaler's loss scale back after a collapse, on the scale's own device."""

import torch

from mp_agent.catalog.guard import Values
from mp_agent.probe.guard.decision.action_budget import ActionBudget


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
