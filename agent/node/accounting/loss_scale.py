"""Trackers of the loss scale: its changes, overflows, its floor, and scales that no hook saw.

The share of steps that a scaler skips is taken over as many steps however long they take.

Finds by the numbers alone that the gradient norm or the loss is not what it is taken for.
A script may clip, or scale its loss, by means that call no hook. The norm is then that after
clipping, and the loss is multiplied by the scale. Both are named as unsupported and no longer
judged.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, frexp, inf, sqrt

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.node.accounting.windows import median
from mp_agent.records.columns import GRADIENT_FACTOR, LOSS_FACTOR
from mp_agent.records.health import LossScaleHistory
from mp_agent.records.merged import MergedStep

_KEPT = 256
"""More than any threshold requires."""


@dataclass(slots=True, kw_only=True)
class LossScaleTracker(Tracker):
    """Tracks the loss scale step by step; the initial one is that of the run's first attempt."""

    scale: float | None = None
    initial: float | None = None
    calibrated: float | None = None
    """The first one after `calibration_steps` of the attempt."""
    consecutive_decreases: int = 0
    changes: list[tuple[int, float]] = field(default_factory=list)
    """Step, counted in the attempt, and scale of the calibrated one and of the last changes."""
    lowered_again: bool = False
    """Whether the last step's decrease is one of too many in a row."""
    low_steps: dict[str, int] = field(default_factory=dict)
    """Threshold → consecutive steps after calibration with a scale that is low by it."""
    low_since: dict[str, int] = field(default_factory=dict)
    """Threshold → step, counted in the attempt, of the first of them."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        scale, before = step.loss_scale, self.scale
        if before is not None and step.columns.get("loss_scale") == 0.0:
            scale = 0.0  # halved so often that FP32 rounds it to 0: below every limit
        if scale is None:
            return
        if self.initial is None:
            self.initial = scale
        if before is not None and scale > before:
            self.consecutive_decreases = 0
        elif before is not None and scale < before:
            self.consecutive_decreases += 1
        self.scale = scale
        calibrating = step.sequence < context.thresholds["calibration_steps"]
        if calibrating:
            return
        if self.calibrated is None:
            self.calibrated = scale
        self._judge(scale, step.sequence, context.thresholds)

    def _judge(self, scale: float, sequence: int, thresholds: Mapping[str, float]) -> None:
        """Count what a scale after calibration is a sign of, in steps."""
        lowered = bool(self.changes) and scale < self.changes[-1][1]
        if not self.changes or scale != self.changes[-1][1]:
            self.changes = [*self.changes[1 - _KEPT :], (sequence, scale)]
        moves = self._moves(sequence - thresholds["loss_scale_change_steps"])
        in_row = next((i for i, move in enumerate(reversed(moves)) if move > 0), len(moves))
        self.lowered_again = lowered and in_row >= thresholds["loss_scale_decreases_in_row"]
        low = self._low(scale, sequence, -sum(moves), thresholds)
        self.low_since = {
            name: self.low_since.get(name, sequence) for name, is_so in low.items() if is_so
        }
        self.low_steps = {
            name: sequence - self.low_since[name] + 1 if is_so else 0 for name, is_so in low.items()
        }

    def _moves(self, after: float) -> list[int]:
        """Return the changes after a step: 1 upward, -1 downward."""
        return [
            1 if scale > before else -1
            for (_, before), (sequence, scale) in pairwise(self.changes)
            if sequence > after
        ]

    def _low(
        self, scale: float, sequence: int, net_decreases: int, thresholds: Mapping[str, float]
    ) -> dict[str, bool]:
        """Return whether a scale is low by each threshold; not where it began as low."""
        initial, calibrated = self.initial or scale, self.calibrated or scale
        low = {
            name: scale < thresholds[name] <= initial
            for name in ("loss_scale_reduced", "loss_scale_very_low", "loss_scale_low")
        }
        # Three times halved since calibration: a halving or two come and go in any healthy run.
        share = thresholds["loss_scale_share_of_calibrated"]
        fallen = scale <= share * calibrated
        fallen_lately = scale <= share * self._highest(
            sequence - thresholds["loss_scale_fall_steps"]
        )
        falling = net_decreases >= thresholds["loss_scale_net_decreases"]
        low["loss_scale_low"] &= falling or (fallen and fallen_lately)
        # Where calibration itself had ended so low, the rest of the fall is no collapse.
        share = thresholds["loss_scale_share_of_initial"]
        low["loss_scale_share_of_initial"] = (
            scale < share * initial
            and fallen
            and (calibrated >= share * initial or scale < share * calibrated)
        )
        return low

    def _highest(self, after: float) -> float:
        """Return the highest scale since a step, that of the step itself included."""
        ends = [sequence for sequence, _ in self.changes[1:]]
        return max(
            scale for (_, scale), end in zip(self.changes, [*ends, inf], strict=True) if end > after
        )

    def view(self) -> LossScaleHistory:
        """Return the values as they are."""
        return LossScaleHistory(
            last=self.scale,
            initial=self.initial,
            calibrated=self.calibrated,
            consecutive_decreases=self.consecutive_decreases,
            low_steps=dict(self.low_steps),
        )

    def next_attempt(self) -> "LossScaleTracker":
        """Return a tracker that knows the initial scale of the run."""
        return LossScaleTracker(initial=self.initial)


@dataclass(slots=True, kw_only=True)
class FloorSkips(Tracker):
    """Remembers the last steps that were skipped with the loss scale at its floor."""

    sequences: list[int] = field(default_factory=list)
    recent: int = 0
    """Number of them within `floor_skip_steps`, if the last step was one; else 0."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        self.fold(step, context.thresholds)

    def fold(self, step: MergedStep, thresholds: Mapping[str, float]) -> None:
        """Account for a closed step."""
        self.recent = 0
        if is_floor_skip(step, thresholds):
            oldest = step.sequence - thresholds["floor_skip_steps"]
            kept = [sequence for sequence in self.sequences if sequence > oldest]
            self.sequences = [*kept[1 - _KEPT :], step.sequence]
            self.recent = len(self.sequences)


def is_floor_skip(step: MergedStep, thresholds: Mapping[str, float]) -> bool:
    """Return whether a step was skipped with the loss scale at or below the floor."""
    scale = step.columns.get("loss_scale")
    return step.skipped and scale is not None and 0.0 <= scale <= thresholds["loss_scale_floor"]


log = logging.getLogger("mp_agent.node")

CLIPPED = "the norm before a clipping that no hook sees"
SCALED = "the loss before a scale that no hook sees"

WINDOW_STEPS = 64
"""Norms among which most are equal where a limit stands behind them."""
_SUSPECTED_STEPS = 8
"""Norms that let a limit be suspected, until there are enough."""
_EQUAL = 1e-3
_EQUAL_SHARE = 0.6
_VARIED = 0.01
"""Spread of the largest gradient elements above which gradients of one norm differ."""
_FACTORS = 16
"""The latest factors that count."""
_FACTORS_AT_LEAST = 4
UNTOUCHED = 1e-6
_UNTOUCHED_SHARE = 0.5
_SCALE_MIN = 64.0
"""Factor of a loss, of which gradients are relieved before the step, that is no mere mean."""


@dataclass(slots=True, kw_only=True)
class Misreadings(Tracker):
    """Tracks what gives a misreading away. Plain data, stored in the ledger.

    norms: with the largest element of each, of the last steps. A gradient that is constant has the
    same in both; a clipped one only in its norm, which is also the highest that there is.
    """

    norms: list[tuple[float, float]] = field(default_factory=list)
    gradient_factors: list[float] = field(default_factory=list)
    loss_factors: list[float] = field(default_factory=list)
    clipped: bool = False
    """The norm is that after a clipping that was not seen."""
    scaled: bool = False
    """The loss is multiplied by a scale that was not seen."""

    @property
    def features(self) -> tuple[str, ...]:
        """What is not measured right, in words."""
        found = ((CLIPPED, self.clipped), (SCALED, self.scaled))
        return tuple(feature for feature, is_so in found if is_so)

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        before = self.features
        self._note_factor(self.gradient_factors, step.get(GRADIENT_FACTOR))
        self._note_factor(self.loss_factors, step.get(LOSS_FACTOR))
        norm, largest = step.grad_norm, step.get("abs_max")
        if step.gradients_judged and norm and largest is not None:
            self.norms = [*self.norms[1 - WINDOW_STEPS :], (norm, largest)]
            self.clipped |= self._is_clipped()
        self.scaled |= step.loss_scale is None and self._is_scaled()
        for feature in set(self.features) - set(before):
            log.warning("mp_agent does not measure this: %s; the rest of it goes on", feature)

    def _note_factor(self, factors: list[float], factor: float | None) -> None:
        if factor is not None and factor > 0.0:
            factors[:] = [*factors[1 - _FACTORS :], factor]

    @property
    def _untouched(self) -> bool:
        """Whether nothing changes the gradients between backward and the step."""
        factors = self.gradient_factors
        same = sum(abs(factor - 1.0) <= UNTOUCHED for factor in factors)
        return len(factors) >= _FACTORS_AT_LEAST and same >= _UNTOUCHED_SHARE * len(factors)

    def _is_clipped(self, steps_at_least: int = WINDOW_STEPS) -> bool:
        """Return whether most norms are equal, and as high as any, of gradients that differ."""
        if len(self.norms) < steps_at_least or self._untouched:
            return False
        limit = max(norm for norm, _ in self.norms)
        largest = [own for norm, own in self.norms if norm >= (1.0 - _EQUAL) * limit]
        varied = max(largest) - min(largest) > _VARIED * max(largest)
        return varied and len(largest) >= _EQUAL_SHARE * len(self.norms)

    def _is_scaled(self) -> bool:
        """Return whether gradients are relieved of a factor that the loss was multiplied by.

        Clipping to a limit far below the norm does that too, if the limit is known by its norms;
        the loss was then multiplied only if that was seen.
        """
        gradients, losses = self.gradient_factors, self.loss_factors
        factor = median(losses) if len(losses) >= _FACTORS_AT_LEAST else 1.0
        if len(gradients) < _FACTORS_AT_LEAST:  # backward makes other ones
            return factor >= _SCALE_MIN and frexp(factor)[0] == 0.5
        relieved = median(gradients) * _SCALE_MIN <= 1.0 and len(self.norms) >= _SUSPECTED_STEPS
        clipped = self.clipped or self._is_clipped(_SUSPECTED_STEPS)
        return relieved and (not clipped or factor >= _SCALE_MIN)


_BLOCK_STEPS = 100
_SIGNIFICANT = 3.0
"""Standard deviations of a random number of skips that a rise is above."""
_STUCK_SKIPS = 16
"""Skipped steps in a row at one loss scale that are no calibration, which would lower it."""


@dataclass(slots=True, kw_only=True)
class OverflowShares(Tracker):
    """Skipped steps by hundreds of steps, after the scaler's calibration.

    Also within it, where skips in a row do not lower the scale.
    """

    blocks: list[int] = field(default_factory=list)
    """Skipped steps in each hundred, the one that is being counted last."""
    steps: int = 0
    """Steps of that one."""
    last: int | None = None
    """The last step, counted in the attempt; what lies between two was not skipped."""
    exceeded: tuple[str, ...] = ()
    """If the last step was skipped: names of the thresholds that the share then exceeds."""
    stuck_skips: int = 0
    """Skipped steps in a row, up to the last one, at one loss scale."""
    scale: float | None = None
    """The loss scale of the last step."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        self.exceeded = ()
        thresholds = context.thresholds
        same = step.skipped and step.loss_scale is not None and step.loss_scale == self.scale
        self.stuck_skips = self.stuck_skips + 1 if same else 0
        self.scale = step.loss_scale
        calibrates = step.sequence < thresholds["calibration_steps"]
        if calibrates and self.stuck_skips < _STUCK_SKIPS:
            return
        made = 1 if self.last is None else max(step.sequence - self.last, 1)
        self.last = step.sequence
        kept = 3 * _blocks(thresholds["overflow_rise_steps"])
        for _ in range(min(made, kept * _BLOCK_STEPS)):
            if not self.blocks or self.steps == _BLOCK_STEPS:
                self.blocks, self.steps = [*self.blocks[1 - kept :], 0], 0
            self.steps += 1
        if step.skipped:
            self.blocks[-1] += 1
            self.exceeded = tuple(self._exceeded(thresholds))

    def _exceeded(self, thresholds: Mapping[str, float]) -> list[str]:
        recent = self.blocks[-_blocks(thresholds["overflow_share_steps"]) :]
        skips, steps = sum(recent), _BLOCK_STEPS * (len(recent) - 1) + self.steps
        enough = steps >= thresholds["overflow_steps"] or self.stuck_skips >= _STUCK_SKIPS
        if skips < thresholds["overflow_skips"] or not enough:
            return []
        bounds = ("overflow_warning", "overflow_critical")
        found = [name for name in bounds if skips > thresholds[name] * steps]
        return [*found, "overflow_rising"] if self._is_rising(thresholds) else found

    def _is_rising(self, thresholds: Mapping[str, float]) -> bool:
        """Return whether the share rose from window to window, by more than chance does."""
        size = _blocks(thresholds["overflow_rise_steps"])
        if len(self.blocks) < 3 * size:
            return False
        first, middle, last = (sum(self.blocks[i * size : (i + 1) * size]) for i in range(3))
        steps = _BLOCK_STEPS * (size - 1) + self.steps
        rise = last - first
        significant = rise >= max(thresholds["overflow_skips"], _SIGNIFICANT * sqrt(first + last))
        high = last > thresholds["overflow_rising"] * steps
        return first < middle < last and significant and high


def _blocks(steps: float) -> int:
    return max(ceil(steps / _BLOCK_STEPS), 1)
