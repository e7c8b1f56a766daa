"""Where the rank stands: stamped into its ring by the hooks, or as the user says."""

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
    """The phase of training, and above it the phases that the user has entered."""

    def __init__(self) -> None:
        self._writer: RingWriter | None = None
        self._training = Phase.STARTING
        self._sequence = 0
        self._entered: list[str] = []

    def stamp_into(self, writer: RingWriter) -> None:
        """Stamp into this ring from now on."""
        self._writer = writer

    def training(self, phase: Phase, sequence: int) -> None:
        """Note where training stands; it shows unless the user has named a phase."""
        self._training, self._sequence = phase, sequence
        if not self._entered:
            self._stamp()

    def enter(self, name: str) -> None:
        """Enter a phase of the user's."""
        self._entered.append(name)
        self._stamp()

    def leave(self) -> None:
        """Return to the phase before."""
        self._entered.pop()
        self._stamp()

    def _stamp(self) -> None:
        if self._writer is None:
            return
        if not self._entered:
            self._writer.stamp(self._training, sequence=self._sequence)
            return
        phase = _BY_NAME.get(self._entered[-1].lower(), Phase.OTHER)
        name = self._entered[-1] if phase is Phase.OTHER else ""
        self._writer.stamp(phase, name=name, sequence=self._sequence)
