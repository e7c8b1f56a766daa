"""Says when GradScaler's loss scale is below a floor, on the scale's own device."""

import torch

from mp_agent.catalog.guard import Values
from mp_agent.probe.guard.decision.action_budget import ActionBudget


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
