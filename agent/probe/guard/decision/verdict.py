"""What is to be done with one update, decided on the device from agreed numbers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from mp_agent.catalog.guard import Values
from mp_agent.probe.guard.decision.action_budget import ActionBudget
from mp_agent.probe.guard.decision.host_lag import host_lag_steps
from mp_agent.probe.guard.decision.reading import FAILURES, NONFINITE, SCALER_SKIPS, SQUARES
from mp_agent.probe.guard.decision.usual_norm import UsualNorm


class UpdateVerdict(NamedTuple):
    """0-dim tensors on the gradients' device; those that begin with `is` are bool."""

    norm: torch.Tensor
    limit: torch.Tensor
    """The lowest norm that would have been a spike."""
    is_nonfinite: torch.Tensor
    is_scaler_skip: torch.Tensor
    """A GradScaler of some rank skips the update."""
    is_spike: torch.Tensor
    is_skipped: torch.Tensor
    """The guard skips the update."""
    coefficient: torch.Tensor
    """What gradients are multiplied by, 1 without a spike."""
    is_none_left: torch.Tensor
    """A policy would have acted, and had already acted too often."""
    is_last_skip: torch.Tensor
    """The guard skips non-finite gradients, and may not do so again by when the host knows."""
    is_failed: torch.Tensor
    """Some rank could not measure its gradients: nothing is decided."""

    @property
    def is_trouble(self) -> torch.Tensor:
        """Whether the update was, or should have been, anything but ordinary (0-dim bool)."""
        return self.is_nonfinite | self.is_scaler_skip | self.is_spike


class Judge:
    """Decides on the updates of one optimizer by the policies that act at once."""

    def __init__(self, policies: Mapping[str, Values], device: torch.device) -> None:
        self._lag_steps = host_lag_steps(device)
        self._nonfinite = _budget(policies, "skip_nonfinite", device)
        self._clip = _Spikes.of(policies, "clip_spikes", device)
        self._skip = _Spikes.of(policies, "skip_spikes", device)

    def judge(self, agreed: torch.Tensor, ranks: int) -> UpdateVerdict:
        """Return what to do, given the sums over so many ranks; once per update, in order.

        Where the scalers of all ranks skip there is nothing left to do; where only some do, the
        others would update their weights alone.
        """
        norm = agreed[SQUARES].sqrt()
        is_scaler_skip = agreed[SCALER_SKIPS] > 0.0
        is_nonfinite = agreed[NONFINITE] > 0.0
        never = torch.zeros_like(is_nonfinite)
        is_failed = agreed[FAILURES] > 0.0
        bad = is_nonfinite | is_scaler_skip | is_failed
        apart = is_scaler_skip & (agreed[SCALER_SKIPS] < ranks)
        harmful = (is_nonfinite | apart) & ~is_failed
        is_skipped = never if self._nonfinite is None else self._nonfinite.grant(harmful)
        none_left = never if self._nonfinite is None else harmful & ~is_skipped
        is_last_skip = never
        if self._nonfinite is not None:
            is_last_skip = is_skipped & (self._nonfinite.left() <= self._lag_steps)
        coefficient, is_spike = torch.ones_like(norm), never
        limit = torch.full_like(norm, torch.inf)
        for spikes in self._spikes:
            found, granted = spikes.found(norm, ~bad & ~is_skipped)
            limit, is_spike = torch.minimum(limit, spikes.history.limit), is_spike | found
            none_left = none_left | (found & ~granted)
            if spikes is self._skip:
                is_skipped = is_skipped | granted
            else:
                coefficient = torch.where(granted, spikes.history.usual / norm, coefficient)
            spikes.history.observe(torch.where(bad, torch.nan, norm))
        return UpdateVerdict(
            norm,
            limit,
            is_nonfinite,
            is_scaler_skip,
            is_spike,
            is_skipped,
            coefficient,
            none_left,
            is_last_skip,
            is_failed,
        )

    @property
    def _spikes(self) -> Sequence["_Spikes"]:
        """Those that skip come first: what is skipped need not be clipped."""
        return [spikes for spikes in (self._skip, self._clip) if spikes is not None]


class _Spikes(NamedTuple):
    history: UsualNorm
    budget: ActionBudget

    @classmethod
    def of(
        cls, policies: Mapping[str, Values], name: str, device: torch.device
    ) -> "_Spikes | None":
        if (budget := _budget(policies, name, device)) is None:
            return None
        values = {key: float(policies[name][key]) for key in _HISTORY}
        return cls(UsualNorm(device=device, **values), budget)

    def found(
        self, norm: torch.Tensor, undecided: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether an update on which nothing is decided is a spike, and may be acted on."""
        found = undecided & (norm > self.history.limit)
        return found, self.budget.grant(found)


_HISTORY = ("z", "factor", "warmup_steps", "memory_steps")


def _budget(policies: Mapping[str, Values], name: str, device: torch.device) -> ActionBudget | None:
    if (values := policies.get(name)) is None:
        return None
    return ActionBudget(float(values["actions_max"]), float(values["window_steps"]), device)
