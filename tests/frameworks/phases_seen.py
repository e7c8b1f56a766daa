"""What a ring is stamped with while a framework trains."""

from mp_agent.records.steps import Phase
from mp_agent.ring.writer import RingWriter


class PhasesSeen:
    """Every change of phase that is stamped into the ring of this process."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._stamp = RingWriter.stamp

    def __enter__(self) -> "PhasesSeen":
        original = self._stamp

        def stamp(writer: RingWriter, phase: Phase, **kwargs) -> None:
            if not self.seen or self.seen[-1] != phase.name:
                self.seen.append(phase.name)
            original(writer, phase, **kwargs)

        RingWriter.stamp = stamp
        return self

    def __exit__(self, *error: object) -> None:
        RingWriter.stamp = self._stamp
