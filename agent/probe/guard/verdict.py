"""What the guard makes of an update: what it reads of the gradients, and what it decides.

What gradient norm is usual in this run, and from which one on it is a spike.
The statistic is ZClip's (arXiv 2504.02507), an exponential average of the mean and the deviation,
of the norm's logarithm: norms vary by factors, and a deviation of the norm itself is inflated by
the first large one. One number for all gradients is enough to agree on with one small collective;
AdaGC (arXiv 2502.11034), which keeps one per tensor, needs one for every tensor of a sharded model.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf, log
from typing import Final, NamedTuple

import torch

from mp_agent.catalog.guard import Values
from mp_agent.probe import accelerator
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.step.measurement import Measurement
from mp_agent.records.columns import GRADIENT_POSITIONS

_DEVICE_LAG_STEPS = 2


def host_lag_steps(device: torch.device) -> int:
    """Return by how many updates decisions made on a device come late to the host, on every rank.

    Ranks that took what has arrived would not act on the same step. The host waits only where it
    is further ahead of the device than that.
    """
    return 0 if accelerator.is_on_host(device) else _DEVICE_LAG_STEPS


SQUARES: Final = 0
"""Sum of squares of the finite elements, unscaled; over all ranks that of the whole model."""
NONFINITE: Final = 1
"""Elements that are NaN or Inf."""
SCALER_SKIPS: Final = 2
"""1 where a GradScaler skips the update."""
FAILURES: Final = 3
"""1 where the gradients could not be measured."""
LOSS_SCALES: Final = 4
"""The loss scale of the gradients; 0 without a GradScaler."""
RATES_HELD: Final = 5
"""1 where a learning rate has jumped, and the update is made with an earlier one."""
RATES_LET: Final = 6
"""1 where it would be, had that not been done too often lately."""
NUMBERS: Final = 7

_SUM_SQUARES = GRADIENT_POSITIONS["sum_squares"]
_NAN, _INF = GRADIENT_POSITIONS["nan_elements"], GRADIENT_POSITIONS["inf_elements"]


class GradientReader:
    """Measures gradients as an optimizer is about to use them."""

    def __init__(self, note_unsupported: Callable[[str], None], *, fused_kernels: bool) -> None:
        self._measurement = Measurement(note_unsupported, fused_kernels=fused_kernels)
        self._note_unsupported = note_unsupported

    def read(self, plan: MeasurementPlan, inverse_scale: Scalar, ranks: int) -> torch.Tensor:
        """Return this rank's part [NUMBERS] of the sums, on the gradients' device.

        inverse_scale: 1 / the factor by which the gradients are still multiplied. A tensor of
        which `replica_count` ranks hold a copy counts with that part of it; one that nothing
        shows to be split or copied counts as a copy on all ranks.
        """
        numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=plan.device)
        gradients = plan.gradients(self._note_unsupported)
        if not plan.shares or all(gradient is None for gradient in gradients):
            return numbers
        totals_GC = self._measurement.totals(plan, gradients, inverse_scale)
        for row, share in enumerate(plan.shares):
            copies = ranks if share.assumed else share.replica_count
            numbers[SQUARES] += totals_GC[row, _SUM_SQUARES] / copies
            numbers[NONFINITE] += totals_GC[row, _NAN] + totals_GC[row, _INF]
        return numbers


def skipped_by_scaler(device: torch.device) -> torch.Tensor:
    """Return the part [NUMBERS] of a rank whose scaler skips the update."""
    numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=device)
    numbers[SCALER_SKIPS] = 1.0
    return numbers


def failed(device: torch.device) -> torch.Tensor:
    """Return the part [NUMBERS] of a rank that cannot measure its gradients."""
    numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=device)
    numbers[FAILURES] = 1.0
    return numbers


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


class UsualNorm:
    """Mean and deviation of the logarithm of the norm, on the norm's device.

    z, factor: a spike is `z` deviations above the mean and `factor` times the usual norm.
    """

    def __init__(
        self,
        *,
        z: float,
        factor: float,
        warmup_steps: float,
        memory_steps: float,
        device: torch.device,
    ) -> None:
        self._z = z
        self._log_factor = log(factor)
        self._warmup_steps = warmup_steps
        self._memory_steps = memory_steps
        self._steps = torch.zeros((), dtype=torch.float64, device=device)
        self._mean = torch.zeros_like(self._steps)
        self._variance = torch.zeros_like(self._steps)

    @property
    def usual(self) -> torch.Tensor:
        """The usual norm: the geometric mean."""
        return self._mean.exp()

    @property
    def limit(self) -> torch.Tensor:
        """The norm above which one is a spike; infinity until enough steps were seen."""
        above = torch.clamp(self._z * self._variance.sqrt(), min=self._log_factor)
        learned = self._steps >= self._warmup_steps
        return torch.where(learned, (self._mean + above).exp(), inf)

    def observe(self, norm: torch.Tensor) -> None:
        """Add a norm, one far above the usual one as if it were `factor` times as large.

        NaN, Inf and 0 say nothing.
        """
        usable = torch.isfinite(norm) & (norm > 0.0)
        difference = torch.where(usable, norm, 1.0).log() - self._mean
        learned = self._steps >= self._warmup_steps
        bound = torch.where(learned, torch.full_like(self._mean, self._log_factor), inf)
        difference = torch.minimum(difference, bound)
        weight = torch.clamp((self._steps + 1.0).reciprocal(), min=1.0 / self._memory_steps)
        weight = torch.where(usable, weight, 0.0)
        self._mean = self._mean + weight * difference
        self._variance = (1.0 - weight) * (self._variance + weight * difference.square())
        self._steps = self._steps + usable.to(torch.float64)


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
    is_rate_held: torch.Tensor
    """Some rank makes the update with an earlier learning rate than its own."""

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
        none_left = none_left | (agreed[RATES_LET] > 0.0)
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
            agreed[RATES_HELD] > 0.0,
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
