"""The loss scale of a run: where it started, where calibration left it, how often it fell."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.merged import MergedStep


@dataclass(slots=True, kw_only=True)
class LossScaleTracker(Tracker):
    """Tracks the loss scale step by step; the initial one is that of the run's first attempt."""

    every_step: ClassVar[bool] = True

    scale: float | None = None
    initial: float | None = None
    calibrated: float | None = None
    """The first one after `calibration_steps` of the attempt."""
    consecutive_decreases: int = 0

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step."""
        scale, before = step.loss_scale, self.scale
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
        if self.calibrated is None and not calibrating:
            self.calibrated = scale

    def view(self, context: AccountContext, time_unix_seconds: float) -> Mapping[str, Any]:
        """Return the values as they are."""
        return {
            "loss_scale": self.scale,
            "loss_scale_initial": self.initial,
            "loss_scale_calibrated": self.calibrated,
            "loss_scale_consecutive_decreases": self.consecutive_decreases,
        }

    def next_attempt(self) -> "LossScaleTracker":
        """Return a tracker that knows the initial scale of the run."""
        return LossScaleTracker(initial=self.initial)
