"""The share of steps that a loss scaler skips, over as many steps however long they take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, sqrt

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.merged import MergedStep

_BLOCK_STEPS = 100
_SIGNIFICANT = 3.0
"""Standard deviations of a random number of skips that a rise is above."""


@dataclass(slots=True, kw_only=True)
class OverflowShares(Tracker):
    """Skipped steps by hundreds of steps after the scaler's calibration."""

    blocks: list[int] = field(default_factory=list)
    """Skipped steps in each hundred, the one that is being counted last."""
    steps: int = 0
    """Steps of that one."""
    last: int | None = None
    """The last step, counted in the attempt; what lies between two was not skipped."""
    exceeded: tuple[str, ...] = ()
    """If the last step was skipped: names of the thresholds that the share then exceeds."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        self.exceeded = ()
        thresholds = context.thresholds
        if step.sequence < thresholds["calibration_steps"]:
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
        if skips < thresholds["overflow_skips"] or steps < thresholds["overflow_steps"]:
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
