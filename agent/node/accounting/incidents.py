"""Where non-finite values were seen first, as far as evidence from before the reduction goes."""

from dataclasses import dataclass, replace

from mp_agent.records.merged import MergedStep
from mp_agent.records.views import FirstNonfinite

HEALTHY_STEPS = 100
"""Clean steps after which the next non-finite value begins a new incident."""
TOLERATED_SKIPS = 2
"""Skipped steps in a row whose loss may be non-finite: one overflowed forward pass is routine."""


@dataclass(slots=True, kw_only=True)
class IncidentTracker:
    """Follows a run's steps and remembers where its latest incident began.

    An overflow that GradScaler skips is none; a non-finite loss on skipped steps becomes one when
    it does not pass, and then began with the first of those steps.
    """

    first: FirstNonfinite | None = None
    first_sequence: int = 0
    clean_steps: int = 0
    suspect: FirstNonfinite | None = None
    """The first of the skipped steps in a row whose loss was not finite."""
    suspect_sequence: int = 0
    suspect_steps: int = 0

    def fold(self, step: MergedStep) -> None:
        """Take a closed step in."""
        loss_nonfinite = step.flag("loss_nonfinite")
        if step.skipped and loss_nonfinite:
            self._suspect(step)
        elif step.skipped:
            self.suspect_steps = 0
        elif loss_nonfinite or step.gradient_nonfinite_elements > 0:
            self.suspect_steps = 0
            self._begin(_first_seen(step), step.sequence)
        else:
            self.suspect_steps = 0
            self.clean_steps += 1

    def set_layer(self, sequence: int, layer: str) -> None:
        """Name the layer of the incident's first step, known a little later than the step.

        Only a value that was born in backward names it: after a non-finite loss every layer is.
        """
        if self.first and self.first_sequence == sequence and self.first.phase == "backward":
            self.first = replace(self.first, layer=layer)

    def _suspect(self, step: MergedStep) -> None:
        if self.suspect_steps == 0:
            self.suspect, self.suspect_sequence = _first_seen(step), step.sequence
        self.suspect_steps += 1
        if self.suspect is not None and self.suspect_steps > TOLERATED_SKIPS:
            self._begin(self.suspect, self.suspect_sequence)

    def _begin(self, first: FirstNonfinite, sequence: int) -> None:
        if self.first is None or self.clean_steps >= HEALTHY_STEPS:
            self.first, self.first_sequence = first, sequence
        self.clean_steps = 0


def _first_seen(step: MergedStep) -> FirstNonfinite:
    return FirstNonfinite(
        step=step.step,
        rank=_blamed_ranks(step),
        layer="",
        phase="forward" if step.flag("loss_nonfinite") else "backward",
    )


def _blamed_ranks(step: MergedStep) -> str:
    """Return the ranks whose own loss was not finite; "" when none, or all alike, were."""
    blamed = step.nonfinite_loss_ranks
    everyone = len(blamed) == len(step.present_ranks) and step.world_size > 1
    return "" if everyone else ",".join(map(str, blamed))
