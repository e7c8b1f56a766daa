"""What a ring is stamped with while a framework trains."""

from typing import Any
from unittest.mock import patch

from mp_agent.records.steps import Phase
from mp_agent.ring.writer import RingWriter


class PhasesSeen:
    """Every change of phase that is stamped into the ring of this process."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __enter__(self) -> "PhasesSeen":
        original = RingWriter.stamp

        def stamp(writer: RingWriter, phase: Phase, **kwargs: Any) -> None:
            if not self.seen or self.seen[-1] != phase.name:
                self.seen.append(phase.name)
            original(writer, phase, **kwargs)

        self._patch = patch.object(RingWriter, "stamp", stamp)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()
