"""The rank's ring: when it is opened, and what the probe reports of itself in it."""

import errno
import logging
import multiprocessing
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mp_agent.errors import RingError
from mp_agent.probe.isolation import Shield
from mp_agent.probe.processes.launchers import Members
from mp_agent.probe.processes.rank_identity import is_helper, make_identity, ranks_are_numbered
from mp_agent.probe.recording.recorder import StepRecorder
from mp_agent.probe.step.phases import PhaseMarks
from mp_agent.records.schema import RankIdentity
from mp_agent.ring import locations
from mp_agent.ring.files import SHORTAGES, no_room
from mp_agent.ring.format.layout import HEAD_BYTES
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")


class ProbeReports:
    """Counts failures and lists unsupported features in the ring, or until there is one in memory.

    Each unsupported feature is logged once.
    """

    def __init__(self) -> None:
        self._writer: RingWriter | None = None
        self._failures = 0
        """Failures before there was a ring."""
        self._features: list[str] = []
        """Features in the order in which they were noted before there was a ring."""
        self._logged: set[str] = set()
        self._device_failed = False

    def write_to(self, writer: RingWriter) -> None:
        """Write to this ring from now on, beginning with what was noted before."""
        self._writer = writer
        writer.count(probe_errors=self._failures)
        for feature in self._features:
            writer.note_unsupported(feature)

    def count_failure(self) -> None:
        """Count a failure of the probe."""
        if self._writer is None:
            self._failures += 1
        else:
            self._writer.count(probe_errors=1)

    def note_unsupported(self, feature: str) -> None:
        """Report a feature of the training script that is not measured.

        Not once a device has failed: that is then the reason, and not the script.
        """
        self._note("mp_agent does not measure this: %s; the rest of it goes on", feature)

    def note_unguarded(self, feature: str) -> None:
        """Report updates on which the guard does not act; they are measured as all others.

        feature: begins with "the guard".
        """
        self._note("%s is off: these updates are made as without a guard", feature)

    def _note(self, message: str, feature: str) -> None:
        if self._device_failed:
            return
        if feature not in self._logged:
            self._logged.add(feature)
            log.warning(message, feature)
        self.list_unsupported(feature)

    def list_unsupported(self, feature: str) -> None:
        """Report a feature that does not take place, and leave it to the caller to log why."""
        if self._writer is not None:
            self._writer.note_unsupported(feature)
        elif feature not in self._features:
            self._features.append(feature)

    def note_capture(self) -> None:
        """Report that steps within CUDA graphs are not measured."""
        self.note_unsupported("CUDA graph capture")

    def note_device_error(self) -> None:
        """Report that a device runs no more, after an error of what it was given to run."""
        self.note_unsupported("steps after an error of the device")
        self._device_failed = True

    def note_rest(self, kind: str) -> None:
        """Report that a part of the probe keeps failing and is suspended."""
        self.note_unsupported(f"{kind}, which keeps failing")


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
        shield: Shield,
        reports: ProbeReports,
        recorder: StepRecorder,
        phases: PhaseMarks,
    ) -> None:
        self.reports = reports
        self._create_ring = create_ring
        self._shield = shield
        self._recorder = recorder
        self._phases = phases
        self.connected = False

    def ensure(self) -> None:
        """Create the ring unless there is one; a failure is contained. Called within the shield."""
        self._shield.contain("connecting", self.connect)

    def connect(self) -> None:
        """Create the ring unless there is one."""
        if self.connected:
            return
        try:
            writer = self._create_ring()
        except ConnectLater:
            return
        if writer is None:
            self._shield.closed = True
            return
        self.connected = True
        self.reports.write_to(writer)
        _close_in_forked_children(self._shield)
        self._recorder.write_to(writer)
        self._phases.stamp_into(writer)


def _close_in_forked_children(shield: Shield) -> None:
    """Have the hooks do nothing in children that this process forks: they are no ranks."""
    reference = weakref.ref(shield)

    def close() -> None:
        if (own := reference()) is not None:
            own.closed = True

    os.register_at_fork(after_in_child=close)


RETRY_SECONDS = 10.0
_TRANSIENT_ERRORS = frozenset(
    (
        errno.EAGAIN,
        *SHORTAGES,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOLCK,
        errno.ENOMEM,
    )
)
"""Shortages of the machine that may be over a moment later."""

_STARTS_AT_MOST = 1000

_rings_created: list[str] = []
"""Launches under which this process has created rings."""


class RankRing(NamedTuple):
    """The ring of this rank, and where it is."""

    identity: RankIdentity
    run_dir: Path
    writer: RingWriter


class RankRingFactory:
    """Creates the ring of this rank; after `shutdown()` and another `init()`, the next one.

    members: the ranks of the process group that the user named, if any. asked_for: by a call in
    the program, not by the environment.
    """

    def __init__(self, settings: Settings, members: Members | None, *, asked_for: bool) -> None:
        self._settings = settings
        self._members = members
        self._asked_for = asked_for and not _is_importing_main()
        self._next_try_seconds = 0.0

    def create(self) -> RankRing | None:
        """Create this rank's ring; return None, with one log line, when that is not possible.

        Raises ConnectLater where the machine is short of something at the moment.
        """
        now_seconds = time.monotonic()
        if now_seconds < self._next_try_seconds:
            raise ConnectLater
        identity = _of_this_start(make_identity(self._settings.run, members=self._members))
        if is_helper(
            identity,
            self._settings.dir,
            asked_for=self._asked_for,
            numbered_by_environment=ranks_are_numbered(),
        ):
            log.debug("process %d is a helper of a rank, and not watched", os.getpid())
            return None
        run_dir = locations.run_directory(self._settings.dir, identity.run)
        try:
            identity = _after_earlier_start(run_dir, identity)
            writer = RingWriter.create(locations.ring_path(run_dir, identity), identity)
        except (OSError, RingError) as error:
            pass_on(error)
            if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRORS:
                if not self._next_try_seconds:
                    full = error.errno in SHORTAGES
                    why = no_room(run_dir, HEAD_BYTES, error.errno) if full else error
                    log.warning("no ring can be made yet, training goes on meanwhile: %s", why)
                self._next_try_seconds = now_seconds + RETRY_SECONDS
                raise ConnectLater from error
            log.warning("no ring can be made, training goes on unwatched: %s", error)
            return None
        _rings_created.append(identity.launch)
        return RankRing(identity, run_dir, writer)


def _is_importing_main() -> bool:
    """Return whether this is a spawned child that imports the program for what it defines."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _of_this_start(identity: RankIdentity) -> RankIdentity:
    """Return the identity under a launch of its own where this process has created rings before.

    After `shutdown()` the ranks begin the run's next attempt, as if they had been started again.
    """
    if not _rings_created:
        return identity
    return replace(identity, launch=f"{identity.launch}-{len(_rings_created)}")


def _after_earlier_start(run_dir: Path, identity: RankIdentity) -> RankIdentity:
    """Return the identity under a launch of its own where a dead process has left its ring.

    A launcher may restart its ranks without any sign of it, and a program may execute itself again.
    """
    launch = identity.launch
    for number in range(1, _STARTS_AT_MOST):
        ring = locations.ring_path(run_dir, identity)
        if not ring.exists() or locations.is_live(ring):
            break
        identity = replace(identity, launch=f"{launch}-{number}")
    return identity
