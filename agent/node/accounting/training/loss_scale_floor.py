"""Counts recent steps that were skipped although the loss scale is at its floor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.merged import MergedStep

_KEPT = 256
"""More than any threshold requires."""


@dataclass(slots=True, kw_only=True)
class FloorSkips(Tracker):
    """Remembers the last steps that were skipped with the loss scale at its floor."""

    sequences: list[int] = field(default_factory=list)
    recent: int = 0
    """Number of them within `floor_skip_steps`, if the last step was one; else 0."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step."""
        self.fold(step, context.thresholds)

    def transition(self) -> Mapping[str, Any]:
        """Return how many steps were skipped of late, if the last one was."""
        return {"recent_floor_skips": self.recent}

    def fold(self, step: MergedStep, thresholds: Mapping[str, float]) -> None:
        """Add a closed step."""
        self.recent = 0
        if is_floor_skip(step, thresholds):
            oldest = step.sequence - thresholds["floor_skip_steps"]
            kept = [sequence for sequence in self.sequences if sequence > oldest]
            self.sequences = [*kept[1 - _KEPT :], step.sequence]
            self.recent = len(self.sequences)


def is_floor_skip(step: MergedStep, thresholds: Mapping[str, float]) -> bool:
    """Return whether a step was skipped with the loss scale at or below the floor."""
    scale = step.loss_scale
    return step.skipped and scale is not None and scale <= thresholds["loss_scale_floor"]
