"""How often a policy may still act: a count on the device, so that asking it costs no wait."""

import torch


class ActionBudget:
    """Lets a policy act `actions_max` times at once, and that often per `window_steps` later."""

    def __init__(self, actions_max: float, window_steps: float, device: torch.device) -> None:
        self._actions_max = actions_max
        self._refill = actions_max / window_steps
        self._left = torch.tensor(actions_max, dtype=torch.float64, device=device)

    def grant(self, wanted: torch.Tensor) -> torch.Tensor:
        """Return whether the policy may act (0-dim bool) given whether it wants to; once a step."""
        granted = wanted & (self._left >= 1.0)
        self._left = torch.clamp(
            self._left - granted.to(torch.float64) + self._refill, max=self._actions_max
        )
        return granted
