"""Opens the rank's ring at the first hook that needs it, and lets everything write to it."""

import os
import weakref
from collections.abc import Callable

from mp_agent.probe.isolation.guard import Guard
from mp_agent.probe.recording.recorder import StepRecorder
from mp_agent.probe.reports import ProbeReports
from mp_agent.probe.step.phases import PhaseMarks
from mp_agent.ring.writer import RingWriter


class ConnectLater(Exception):
    """The ring cannot be created at the moment; it is to be tried again."""


class RingConnection:
    """The ring of this process, from the moment at which it can be created.

    create_ring: returns None when that is not possible, upon which the probe does nothing any
    more; raises ConnectLater to be called again at the next backward.
    """

    def __init__(
        self,
        create_ring: Callable[[], RingWriter | None],
        guard: Guard,
        reports: ProbeReports,
        recorder: StepRecorder,
        phases: PhaseMarks,
    ) -> None:
        self.reports = reports
        self._create_ring = create_ring
        self._guard = guard
        self._recorder = recorder
        self._phases = phases
        self._connected = False

    def ensure(self) -> None:
        """Create the ring unless there is one; a failure is contained. Called within the guard."""
        self._guard.contain("connecting", self.connect)

    def connect(self) -> None:
        """Create the ring unless there is one."""
        if self._connected:
            return
        try:
            writer = self._create_ring()
        except ConnectLater:
            return
        if writer is None:
            self._guard.closed = True
            return
        self._connected = True
        self.reports.write_to(writer)
        _close_in_forked_children(self._guard)
        self._recorder.write_to(writer)
        self._phases.stamp_into(writer)


def _close_in_forked_children(guard: Guard) -> None:
    """Have the hooks do nothing in children that this process forks: they are no ranks."""
    reference = weakref.ref(guard)

    def close() -> None:
        if (own := reference()) is not None:
            own.closed = True

    os.register_at_fork(after_in_child=close)
