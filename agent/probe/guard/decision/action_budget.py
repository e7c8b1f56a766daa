"""How often a policy may still act: steps kept on the device, so that asking costs no wait."""

from math import inf

import torch


class ActionBudget:
    """Lets a policy act at most `actions_max` times within any `window_steps` steps."""

    def __init__(self, actions_max: float, window_steps: float, device: torch.device) -> None:
        actions = int(min(actions_max, window_steps))
        self._window_steps = window_steps
        self._step = 0
        self._places_A = torch.arange(actions, device=device)
        self._acted_A = torch.full((actions,), -inf, dtype=torch.float64, device=device)
        """Steps of the last actions, the place of the oldest being that of the next."""
        self._next = torch.zeros((), dtype=torch.int64, device=device)

    def grant(self, wanted: torch.Tensor) -> torch.Tensor:
        """Return whether the policy may act (0-dim bool) given whether it wants to; once a step."""
        self._step += 1
        is_next_A = self._places_A == self._next
        oldest = torch.where(is_next_A, self._acted_A, -inf).max()
        granted = wanted & (oldest <= self._step - self._window_steps)
        self._acted_A = torch.where(is_next_A & granted, float(self._step), self._acted_A)
        self._next = (self._next + granted) % len(self._places_A)
        return granted

    def left(self) -> torch.Tensor:
        """Return how often it may act from the next step on (0-dim int64)."""
        return (self._acted_A <= self._step + 1 - self._window_steps).sum()
