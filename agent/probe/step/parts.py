"""How long the parts of a step take: data, forward, backward, optimizer; by the host's clock."""

from collections.abc import Mapping
from enum import Enum
from math import isnan, nan
from threading import get_ident
from time import perf_counter


class StepPart(Enum):
    """What the loop is doing, with the column that its time is added to."""

    BETWEEN = ""
    """Between passes or steps: data if a forward follows, otherwise no part."""
    DATA = "data_seconds"
    FORWARD = "forward_seconds"
    BACKWARD = "backward_seconds"
    OPTIMIZER = "optimizer_seconds"


OTHER = "other_seconds"
"""Column of what is left of the step's time."""


class StepParts:
    """Adds up the parts of the step under way, over its passes. No part is known that is not seen.

    `forward_begins` is called from the training thread or another one, the rest from the former.
    """

    def __init__(self) -> None:
        self._current = StepPart.BETWEEN
        self._since_seconds = nan
        self._between_seconds = 0.0
        """Between passes or steps, before what is not training began."""
        self._seconds: dict[StepPart, float] = {}
        self._unknown: set[StepPart] = set()
        """Parts of this step of which some was not seen."""
        self._forward_seen = False
        """Since an optimizer has stepped."""
        self._not_training = False
        self._within_step = False
        """The backward that ended last was in an optimizer's closure."""
        self._thread: int | None = None

    @property
    def awaits_forward(self) -> bool:
        """Whether a forward of the model would begin the forward part."""
        return self._current in (StepPart.BETWEEN, StepPart.OPTIMIZER) and not self._not_training

    def forward_begins(self) -> None:
        """Count what went on since the last pass or step as data, if this thread trains the run."""
        if not self.awaits_forward or get_ident() != self._thread:
            return
        if self._current is StepPart.OPTIMIZER and not self._within_step:
            self._since_seconds = perf_counter()  # there was no step, and loading began unseen
        self._enter(StepPart.FORWARD)
        self._forward_seen = True

    def backward_begins(self) -> None:
        """End the forward part; if it was not seen, neither it nor data can be known."""
        if not self._forward_seen:
            self._unknown.update((StepPart.DATA, StepPart.FORWARD))
        self._enter(StepPart.BACKWARD)

    def backward_ended(self, *, within_step: bool) -> None:
        """End backward. within_step: it was in the closure of an optimizer that is stepping."""
        self._within_step = within_step
        self._enter(StepPart.OPTIMIZER if within_step else StepPart.BETWEEN)

    def optimizer_begins(self) -> None:
        """Begin the optimizer part, unless it has begun."""
        if self._current is StepPart.FORWARD:
            self._unknown.add(StepPart.FORWARD)  # it contains a backward that was not seen
        if self._current is not StepPart.OPTIMIZER:
            self._enter(StepPart.OPTIMIZER)

    def optimizer_ended(self) -> None:
        """End the optimizer part: the optimizer has stepped, or has skipped its step."""
        self._enter(StepPart.BETWEEN)
        self._forward_seen = self._within_step = False

    def not_training(self, begins: bool) -> None:
        """Count nothing while the rank evaluates, saves a checkpoint or is in a named phase."""
        if begins is self._not_training:
            return
        if self._current is StepPart.BETWEEN:
            self._add_up(perf_counter())
        self._not_training = begins

    def known(self, step_seconds: float) -> Mapping[str, float]:
        """Return the parts of the step under way that are known, by column; it is about to end.

        step_seconds: its wall time; NaN on the first, of which no beginning is known.
        """
        self._add_up(perf_counter())
        known = {
            part.value: seconds
            for part, seconds in self._seconds.items()
            if part not in self._unknown and not isnan(seconds)
        }
        if not isnan(step_seconds):
            known[OTHER] = max(step_seconds - sum(known.values()), 0.0)
        return known

    def step_begins(self) -> None:
        """Start over with the next step; what the probe did since the end of the last is not it."""
        self._thread = get_ident()
        self._current = StepPart.BETWEEN
        self._seconds.clear()
        self._unknown.clear()
        self._forward_seen = self._within_step = False
        self._between_seconds, self._since_seconds = 0.0, perf_counter()

    def _enter(self, part: StepPart) -> None:
        self._add_up(perf_counter())
        if part is StepPart.FORWARD and self._current is StepPart.BETWEEN:
            self._add(StepPart.DATA, self._between_seconds)
        self._between_seconds = 0.0
        self._current = part

    def _add_up(self, now_seconds: float) -> None:
        """Add the time since the last change to what went on."""
        seconds, self._since_seconds = now_seconds - self._since_seconds, now_seconds
        if self._current is not StepPart.BETWEEN:
            self._add(self._current, seconds)
        elif not self._not_training:
            self._between_seconds += seconds

    def _add(self, part: StepPart, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds
