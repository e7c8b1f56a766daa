"""The phase of the rank: stamped into its ring by the hooks, or as the user says."""

from collections.abc import Callable

from mp_agent.records.steps import Phase
from mp_agent.ring.writer import RingWriter

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

    def __init__(self, not_training: Callable[[bool], None] = lambda begins: None) -> None:
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
        if not self._entered:
            self._not_training(False)
            self._stamp(anew=True)

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
        self._not_training(not self.in_training)
        self._stamp()

    def _stamp(self, *, anew: bool = False) -> None:
        """Stamp the phase if it has changed; if `anew`, in any case, with the time."""
        now = (*self._shown(), self._sequence)
        if self._writer is None or (now == self._stamped and not anew):
            return
        self._stamped = now
        phase, name, sequence = now
        self._writer.stamp(phase, name=name, sequence=sequence)

    def _shown(self) -> tuple[Phase, str]:
        if self._entered:
            phase = _BY_NAME.get(self._entered[-1].lower(), Phase.OTHER)
            return phase, self._entered[-1] if phase is Phase.OTHER else ""
        if self._saves:
            return Phase.CHECKPOINT, ""
        return (Phase.EVAL if self._signs else self._training), ""
