"""What the run's own losses say of its next one: the usual level, its scatter, its trend."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.node.account.medians import LARGEST, deviation, median
from mp_agent.records.health import LossLevel
from mp_agent.records.merged import MergedStep

WINDOW_STEPS = 256
"""Losses whose median is the usual level."""
WARM_UP_STEPS = 64
"""Losses before which there is no usual level."""
BLOCK_STEPS = 16
"""Losses of which the trend remembers the median alone."""
TREND_BLOCKS = 32
"""Blocks in each of the two windows that the trend compares: 512 steps."""


@dataclass(slots=True, kw_only=True)
class LossWatch:
    """Follows the merged loss of a run. Bounded, and plain data: it goes into the ledger.

    Only losses that count enter: finite on all ranks, of steps that were neither skipped nor
    lacked a rank. A single one above the spike bound is an odd batch; two of the last three are a
    spike.
    """

    window: list[float] = field(default_factory=list)
    above: list[bool] = field(default_factory=list)
    """Whether each of the last losses was above the bound of its time."""
    block: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    """Medians of the last blocks, oldest first."""
    spiking: bool = False
    """Whether the last step that was taken in belongs to a spike."""

    def fold(self, step: MergedStep, thresholds: Mapping[str, float]) -> None:
        """Take a closed step in; the window that judges it does not hold it yet."""
        loss = step.get("loss")
        self.spiking = False
        if loss is None or not _counts(step):
            return
        level = self.level(thresholds)
        self.above = [*self.above[-2:], level is not None and loss > level.spike_bound]
        self.spiking = self.above[-1] and sum(self.above) > 1
        self.window = [*self.window[1 - WINDOW_STEPS :], loss]
        self._fold_block(loss)

    def level(self, thresholds: Mapping[str, float]) -> LossLevel | None:
        """Return the usual level; None before the warm-up, and where nothing tells a scale."""
        if len(self.window) < WARM_UP_STEPS:
            return None
        center = median(self.window)
        spread = deviation(self.window, center)
        used = max(spread, thresholds["loss_deviation_floor"] * abs(center))
        if used == 0.0:
            return None
        bound = min(center + min(thresholds["loss_spike_deviations"] * used, LARGEST), LARGEST)
        return LossLevel(median=center, deviation=spread, spike_bound=bound)

    def trend(self, thresholds: Mapping[str, float]) -> float | None:
        """Return by how many deviations the loss rose from one long window to the next.

        Medians of blocks stand for their losses: an outlier, a spike and a slow wave within a
        window weigh little. None until both windows are full.
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

    def _fold_block(self, loss: float) -> None:
        self.block = [*self.block, loss]
        if len(self.block) >= BLOCK_STEPS:
            self.medians = [*self.medians[1 - 2 * TREND_BLOCKS :], median(self.block)]
            self.block = []


def _counts(step: MergedStep) -> bool:
    return not step.skipped and not step.flag("loss_nonfinite") and step.coverage == 1.0
