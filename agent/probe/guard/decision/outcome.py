"""What became of an update, on the host: at once, or from a device some steps later."""

from collections import deque
from typing import NamedTuple

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.guard.decision.host_lag import host_lag_steps
from mp_agent.probe.guard.decision.verdict import UpdateVerdict


class UpdateOutcome(NamedTuple):
    """A verdict, read; the fields are those of `UpdateVerdict`."""

    norm: float
    limit: float
    is_nonfinite: bool
    is_scaler_skip: bool
    is_spike: bool
    is_skipped: bool
    coefficient: float
    is_none_left: bool
    is_last_skip: bool
    is_failed: bool

    @property
    def is_trouble(self) -> bool:
        """Whether the update was, or should have been, anything but ordinary."""
        return self.is_nonfinite or self.is_scaler_skip or self.is_spike

    @property
    def is_clipped(self) -> bool:
        """Whether the guard scales the gradients down."""
        return self.coefficient != 1.0


class Outcomes:
    """The verdicts on one optimizer's updates on their way to the host, in order."""

    def __init__(self) -> None:
        self._copies: deque[accelerator.HostCopy] = deque()

    def add(self, verdict: UpdateVerdict) -> list[UpdateOutcome]:
        """Take the next verdict; return those that the slower policies get to see now."""
        numbers = torch.stack([value.to(torch.float64) for value in verdict])
        self._copies.append(accelerator.HostCopy(numbers))
        lag = host_lag_steps(numbers.device)
        due: list[UpdateOutcome] = []
        while len(self._copies) > lag:
            due.append(_read(self._copies.popleft().numbers()))
        return due


def _read(numbers: list[float]) -> UpdateOutcome:
    norm, limit, nonfinite, scaler_skip, spike, skipped, coefficient = numbers[:7]
    none_left, last_skip, failed = numbers[7:]
    return UpdateOutcome(
        norm=norm,
        limit=limit,
        is_nonfinite=bool(nonfinite),
        is_scaler_skip=bool(scaler_skip),
        is_spike=bool(spike),
        is_skipped=bool(skipped),
        coefficient=coefficient,
        is_none_left=bool(none_left),
        is_last_skip=bool(last_skip),
        is_failed=bool(failed),
    )
