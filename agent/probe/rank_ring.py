"""Creates the ring of this rank, once it is known which rank this process is."""

import errno
import logging
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mp_agent.errors import RingError
from mp_agent.probe.identity.process_group import Members
from mp_agent.probe.identity.rank_identity import make_identity, ranks_are_numbered
from mp_agent.probe.processes.helpers import is_helper
from mp_agent.probe.ring_connection import ConnectLater
from mp_agent.records.schema import RankIdentity
from mp_agent.ring import locations
from mp_agent.ring.files import SHORTAGES, no_room
from mp_agent.ring.format.layout import HEAD_BYTES
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")

RETRY_SECONDS = 10.0
_TRANSIENT_ERRORS = frozenset(
    (
        errno.EAGAIN,
        errno.EDQUOT,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOLCK,
        errno.ENOMEM,
        errno.ENOSPC,
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
                    why = no_room(run_dir, HEAD_BYTES) if full else error
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
