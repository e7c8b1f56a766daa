"""Compares the loss with the run's own history: usual level, scatter, spikes, trend."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mp_agent.node.accounting.medians import (
    LARGEST,
    breadth,
    deviation,
    deviation_of_array,
    median,
    median_of_array,
)
from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.node.accounting.training.loss_reference import LossReference
from mp_agent.records.health import LossLevel
from mp_agent.records.merged import MergedStep

WINDOW_STEPS = 256
"""Number of losses whose median is the usual level."""
_JUDGED_STEPS = 3
_HIGH_SHARE = 0.97
WARM_UP_STEPS = 64
"""Number of losses below which there is no usual level."""
BLOCK_STEPS = 16
"""Losses per block; the trend keeps only their median."""
RECENT_STEPS = 64
"""Losses whose median is compared with the best level."""
NOISY_SHARE = 0.01
"""Share of losses above the bound from which on the losses count as noisy."""
TREND_BLOCKS = 32
"""Blocks in each of the two windows that the trend compares: 512 steps."""


@dataclass(slots=True, kw_only=True)
class LossTracker(Tracker):
    """Tracks the merged loss of a run. Bounded plain data, stored in the ledger.

    Only these losses count: finite on all ranks that delivered, of steps that were not skipped,
    over about as many ranks as the losses before. A single loss above the spike bound is an odd
    batch; two of the last three are a spike. Noisy losses need three in a row and a higher bound.
    """

    window: list[float] = field(default_factory=list)
    usual: LossLevel | None = None
    """The level of the window."""
    above: list[bool] = field(default_factory=list)
    """Whether each of the last losses was above the bound at that time."""
    block: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    """Medians of the last blocks, oldest first."""
    trend_deviations: float | None = None
    """The trend of these medians."""
    spiking: bool = False
    """Whether the last step belongs to a spike."""
    explained: bool = False
    """Whether the learning rate schedule restarted shortly before the last step."""
    rising: bool = False
    """Whether the trend was above its limit after the last complete block."""
    rising_steps: int = 0
    """Consecutive losses for which the trend was above its limit."""
    reference: LossReference = field(default_factory=LossReference)
    ranks: int = 0
    """Number of ranks over which the last loss that counted is the mean."""
    fewer_steps: int = 0
    """Consecutive losses over less than half as many ranks."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, with the disturbances that may set the loss back."""
        norms, learning = context.progress.norms, context.progress.learning
        largest = max(norms.exploded.values(), default=0.0)
        unskipped_nonfinite = step.gradient_nonfinite_elements > 0 and not step.skipped
        high = largest > context.thresholds["grad_norm_high"]
        severe = unskipped_nonfinite or learning.rate_jumped or high
        if severe or largest or learning.rate_raised:
            self.reference.disturb(severe=severe)
        self.fold(step, context.thresholds)
        broken = step.flag("loss_nonfinite") and not step.skipped
        if learning.confirm(trouble=broken or self.spiking or bool(norms.exploded)):
            self.reference.disturb(severe=True)
        self.explained = learning.restarted

    def transition(self) -> Mapping[str, Any]:
        """Return whether the last step belongs to a spike that nothing explains."""
        return {"loss_spiking": self.spiking and not self.explained}

    def health(self, context: AccountContext) -> Mapping[str, Any]:
        """Return the usual loss, its trend, and the best level."""
        return {
            "loss": self.usual,
            "loss_trend": self.trend_deviations,
            "loss_rising_steps": self.rising_steps,
            "loss_standing": self.reference.standing,
        }

    def fold(self, step: MergedStep, thresholds: Mapping[str, float]) -> None:
        """Add a closed step; it is judged by the window before it."""
        loss = step.get("loss")
        self.spiking = False
        if loss is None or step.skipped or step.flag("loss_nonfinite"):
            return
        if not self._has_usual_ranks(len(step.present_ranks)):
            return
        level = self.usual
        self.above = [*self.above[-2:], level is not None and loss > level.spike_bound]
        needed = 3 if level is not None and level.noisy else 2
        self.spiking = self.above[-1] and sum(self.above) >= needed
        self.window = [*self.window[1 - WINDOW_STEPS :], loss]
        self.usual = self.level(thresholds)
        self._fold_block(loss)
        if not self.block:
            trend = self.trend_deviations = self.trend(thresholds)
            self.rising = trend is not None and trend > thresholds["loss_trend_deviations"]
        self.rising_steps = self.rising_steps + 1 if self.rising else 0
        if level is not None:
            # A falling loss scatters by its fall too; the fewer losses, the less.
            recent = self.window[-RECENT_STEPS:]
            center = median(recent)
            self.reference.fold(center, breadth(recent, center), thresholds)

    def level(self, thresholds: Mapping[str, float]) -> LossLevel | None:
        """Return the usual level; None during the warm-up, and where there is no scale."""
        if len(self.window) < WARM_UP_STEPS:
            return None
        window = np.array(self.window)
        center = median_of_array(window)
        spread = deviation_of_array(window, center)
        used = max(spread, thresholds["loss_deviation_floor"] * abs(center))
        if used == 0.0:
            return None
        bound = _bound(center, thresholds["loss_spike_deviations"] * used)
        # Without the last losses, which may be the spike itself.
        settled = window[:-_JUDGED_STEPS]
        noisy = bool(np.count_nonzero(settled > bound) > NOISY_SHARE * settled.size)
        if noisy:
            bound = _bound(center, thresholds["loss_spike_noisy_deviations"] * used)
            high = float(np.sort(settled)[int(_HIGH_SHARE * settled.size)])
            bound = max(bound, _bound(center, 2 * (high - center)))
        return LossLevel(median=center, deviation=spread, spike_bound=bound, noisy=noisy)

    def trend(self, thresholds: Mapping[str, float]) -> float | None:
        """Return by how many deviations the loss rose from one long window to the next.

        Based on medians of blocks, so that an outlier, a spike or a slow wave within a window
        weighs little. None until both windows are full.
        """
        if len(self.medians) < 2 * TREND_BLOCKS:
            return None
        before, recent = self.medians[:TREND_BLOCKS], self.medians[TREND_BLOCKS:]
        center = median(before)
        floor = thresholds["loss_deviation_floor"] * abs(center)
        used = max(deviation(before, center), floor)
        rise = min(max(median(recent) - center, -LARGEST), LARGEST)
        if used == 0.0:
            return None if rise else 0.0
        return min(max(rise / used, -LARGEST), LARGEST)

    def _has_usual_ranks(self, ranks: int) -> bool:
        """Return whether a mean over this many ranks is comparable with the losses before.

        A few missing ranks do not matter. A mean over far fewer scatters more; that becomes the
        usual scatter if they stay away.
        """
        if 2 * ranks < self.ranks:
            self.fewer_steps += 1
            if self.fewer_steps < WARM_UP_STEPS:
                return False
            self.window, self.usual, self.above = [], None, []
        self.fewer_steps, self.ranks = 0, ranks
        return True

    def _fold_block(self, loss: float) -> None:
        self.block = [*self.block, loss]
        if len(self.block) >= BLOCK_STEPS:
            self.medians = [*self.medians[1 - 2 * TREND_BLOCKS :], median(self.block)]
            self.block = []


def _bound(center: float, distance: float) -> float:
    return min(center + min(distance, LARGEST), LARGEST)
