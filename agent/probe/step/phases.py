"""Phases of a rank, and parts of a step: when each began, and how long it took."""

from collections.abc import Callable, Mapping
from enum import Enum
from math import isnan, nan
from threading import get_ident
from time import perf_counter

from mp_agent.records.steps import Phase
from mp_agent.ring.writer import RingWriter


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

    def __init__(self, *, on: bool = True) -> None:
        """on: whether anything is timed."""
        self._on = on
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
        if not self._on:
            return
        if not self._forward_seen:
            self._unknown.update((StepPart.DATA, StepPart.FORWARD))
        self._enter(StepPart.BACKWARD)

    def backward_ended(self, *, within_step: bool) -> None:
        """End backward. within_step: it was in the closure of an optimizer that is stepping."""
        if not self._on:
            return
        self._within_step = within_step
        self._enter(StepPart.OPTIMIZER if within_step else StepPart.BETWEEN)

    def optimizer_begins(self) -> None:
        """Begin the optimizer part, unless it has begun."""
        if not self._on:
            return
        if self._current is StepPart.FORWARD:
            self._unknown.add(StepPart.FORWARD)  # it contains a backward that was not seen
        if self._current is not StepPart.OPTIMIZER:
            self._enter(StepPart.OPTIMIZER)

    def optimizer_ended(self) -> None:
        """End the optimizer part: the optimizer has stepped, or has skipped its step."""
        if not self._on:
            return
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
        if not self._on:
            return
        self._thread = get_ident()
        self._current = StepPart.BETWEEN
        self._seconds.clear()
        self._unknown.clear()
        self._forward_seen = self._within_step = False
        self._between_seconds, self._since_seconds = 0.0, perf_counter()

    def _enter(self, part: StepPart) -> None:
        self._add_up(perf_counter())
        if part is StepPart.FORWARD and self._current is StepPart.BETWEEN:
            data_seconds = self._seconds.get(StepPart.DATA, 0.0)
            self._seconds[StepPart.DATA] = data_seconds + self._between_seconds
        self._between_seconds = 0.0
        self._current = part

    def _add_up(self, now_seconds: float) -> None:
        """Add the time since the last change to what went on."""
        seconds, self._since_seconds = now_seconds - self._since_seconds, now_seconds
        if self._current is not StepPart.BETWEEN:
            self._seconds[self._current] = self._seconds.get(self._current, 0.0) + seconds
        elif not self._not_training:
            self._between_seconds += seconds


_BY_NAME = {
    "eval": Phase.EVAL,
    "evaluation": Phase.EVAL,
    "validation": Phase.EVAL,
    "checkpoint": Phase.CHECKPOINT,
    "checkpointing": Phase.CHECKPOINT,
}


class PhaseMarks:
    """The phase of training, overridden by evaluation and saving, then by the user's phases.

    Evaluation has several signs, such as the model's mode and a stretch without gradients: it goes
    on while there is one of them, and at the latest until the next backward. That a sign is over
    may come without notice, so it is asked for as well.
    """

    def __init__(self, not_training: Callable[[bool], None] | None = None) -> None:
        """not_training: called with True as the rank leaves training, with False as it returns."""
        self._not_training = not_training
        self._writer: RingWriter | None = None
        self._training = Phase.STARTING
        self._sequence = 0
        self._raised = False
        """What the phase of training says has raised: a script may go on all the same."""
        self._signs: dict[str, Callable[[], bool]] = {}
        """Each with what says that it is over."""
        self._saves = 0
        self._entered: list[str] = []
        self._stamped: tuple[Phase, str, int] | None = None

    def stamp_into(self, writer: RingWriter) -> None:
        """Stamp into this ring from now on."""
        self._writer = writer
        self._stamped = None

    @property
    def between_steps(self) -> bool:
        """Whether training has begun and neither a backward nor an optimizer is running."""
        return self._training is Phase.FORWARD or self._raised

    @property
    def in_training(self) -> bool:
        """Whether the rank neither evaluates nor saves, nor is in a phase that the user named."""
        if over := [sign for sign, is_over in self._signs.items() if is_over()]:
            for sign in over:
                del self._signs[sign]
            self._changed()
        return not (self._entered or self._saves or self._signs)

    def training(self, phase: Phase, sequence: int) -> None:
        """Set the phase of training; it shows unless the user has named one."""
        self._training, self._sequence, self._raised = phase, sequence, False
        self._signs.clear()
        self._saves = 0
        if self._entered:
            return
        if self._not_training is not None:
            self._not_training(False)
        if self._writer is not None:
            self._stamped = phase, "", sequence
            self._writer.stamp(phase, sequence=sequence)

    def training_raised(self) -> None:
        """Stay in the phase of training, in which an exception was raised."""
        self._raised = True

    def evaluation(
        self, sign: str, begins: bool, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Record that a sign of evaluation appears or disappears between two steps.

        is_over: says whether one that appears has disappeared since.
        """
        if not self.between_steps:
            return
        if begins:
            self._signs[sign] = is_over
        else:
            self._signs.pop(sign, None)
        self._changed()

    def saving(self, begins: bool) -> None:
        """Record that saving a checkpoint starts, or has ended."""
        self._saves = max(0, self._saves + (1 if begins else -1))
        self._changed()

    def enter(self, name: str) -> None:
        """Enter a phase that the user names."""
        self._entered.append(name)
        self._changed()

    def leave(self) -> None:
        """Return to the phase before."""
        self._entered.pop()
        self._changed()

    def _changed(self) -> None:
        in_training = self.in_training
        if self._not_training is not None:
            self._not_training(not in_training)
        self._stamp()

    def _stamp(self) -> None:
        """Stamp the phase if it has changed."""
        phase, name = self._training, ""
        if self._entered:
            phase = _BY_NAME.get(self._entered[-1].lower(), Phase.OTHER)
            name = self._entered[-1] if phase is Phase.OTHER else ""
        elif self._saves:
            phase = Phase.CHECKPOINT
        elif self._signs:
            phase = Phase.EVAL
        now = phase, name, self._sequence
        if self._writer is None or now == self._stamped:
            return
        self._stamped = now
        self._writer.stamp(phase, name=name, sequence=self._sequence)
