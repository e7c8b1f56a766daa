"""Finds the rings of a run, distinguishes its attempts, and refuses those of another job."""

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from mp_agent.errors import RingError
from mp_agent.node.collect.attempt import LocalAttempt
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.locations import launch_origin
from mp_agent.ring.reader import RingReader

log = logging.getLogger("mp_agent.node")


class RingFinder:
    """Scans a run's directory; opens each ring once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._seen: set[Path] = set()
        self.refused = 0
        """Rings that cannot be read: other version, truncated, foreign owner."""

    def new_rings(self) -> Iterator[tuple[Path, RingReader]]:
        """Yield the rings that appeared since the last call."""
        for path in locations.find_rings(self._run_dir):
            if path in self._seen:
                continue
            try:
                reader = RingReader.open(path)
            except FileNotFoundError:
                continue
            except (RingError, OSError) as error:
                self.refused += 1
                log.error("refused a ring: %s", error)
            else:
                yield path, reader
            self._seen.add(path)

    def forget(self, path: Path) -> None:
        """Yield a ring again, as if it were new."""
        self._seen.discard(path)

    def forget_removed(self) -> None:
        """Forget rings that are no longer there.

        A program that starts its ranks again and again uses the paths of removed rings again.
        """
        self._seen = set(filter(os.path.exists, self._seen))

    @property
    def known(self) -> tuple[Path, ...]:
        """The rings that were found, as far as they were not forgotten."""
        return tuple(self._seen)

    def has_new(self) -> bool:
        """Return whether there is a ring that was not opened yet."""
        return bool(set(locations.find_rings(self._run_dir)) - self._seen)


def remove_ring(path: Path) -> None:
    """Delete a ring's file, and its directory if that is empty then."""
    try:
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    except OSError:
        return


_READ_KEPT = 64
_GENERATIONS = 8
"""Maximal number of processes between a script and the ranks that it starts."""

Launch = tuple[str, int]
"""Launcher and attempt."""

Rings = list[tuple[Path, RingReader]]
"""Rings of one launch, at least one."""


class LaunchStatus(Enum):
    """Attempt to which the rings of a launch belong."""

    PRESENT = auto()
    NEXT = auto()
    NOT_YET = auto()
    """The next attempt, while a rank has not left the current one."""
    NAME_CONFLICT = auto()
    """Another job of the same name, while the current one trains."""
    OVER = auto()


@dataclass(slots=True)
class Launches:
    """The launches that make up the current attempt of a run, usually one."""

    known: set[Launch] = field(default_factory=set)
    newest_unix_ns: int = 0
    """When the newest of their rings was created; older launches are over."""
    read: tuple[Launch, ...] = ()
    """The last launches of earlier attempts whose rings were read completely."""

    def status_of(self, rings: Rings, attempt: LocalAttempt) -> LaunchStatus:
        """Return to which attempt the rings of one launch belong; attempt: the current one."""
        if launch_of(rings) in self.known or _are_further_ranks(rings, attempt):
            return LaunchStatus.PRESENT
        if self._conflict(rings, attempt):
            starts = {launch_origin(launch) for launch, _ in self.known}
            again = launch_origin(rings[0][1].identity.launch) in starts
            return LaunchStatus.NOT_YET if again else LaunchStatus.NAME_CONFLICT
        read = launch_of(rings) in self.read
        if made_unix_ns(rings) > self.newest_unix_ns or (
            not read and _are_successors(rings, attempt)
        ):
            return LaunchStatus.NEXT
        return LaunchStatus.OVER

    def _conflict(self, rings: Rings, attempt: LocalAttempt) -> bool:
        """Return whether two launchers have live ranks: a launcher ends all ranks before a restart.

        The same launcher may start ranks before those of the previous attempt are gone, and a
        script that has trained may start ranks itself.
        """
        launchers = {launch for launch, _ in self.known}
        return (
            attempt.seen
            and attempt.end is EndReason.RUNNING
            and rings[0][1].identity.launch not in launchers
            and any_alive(rings)
            and attempt.alive
            and not _are_descendants(rings, attempt)
        )

    def begin_attempt(self, rings: Rings) -> None:
        """Drop the launches of the previous attempt; the next one begins with these rings."""
        self.read = (*self.read, *sorted(self.known))[-_READ_KEPT:]
        self.known, self.newest_unix_ns = set(), 0
        self.add(rings)

    def add(self, rings: Rings) -> None:
        """Add the rings to the current attempt."""
        self.known.add(launch_of(rings))
        self.newest_unix_ns = max(self.newest_unix_ns, made_unix_ns(rings))


def by_launch(rings: Iterable[tuple[Path, RingReader]], known: Collection[Launch]) -> list[Rings]:
    """Return the rings grouped by launch: known ones, then the others, each the newest last."""
    groups: dict[Launch, Rings] = {}
    for path, reader in rings:
        launch = (reader.identity.launch, reader.identity.attempt)
        groups.setdefault(launch, []).append((path, reader))
    # Others wait or follow depending on whether the ranks of the known ones are alive.
    return sorted(groups.values(), key=lambda own: (launch_of(own) not in known, made_unix_ns(own)))


def launch_of(rings: Rings) -> Launch:
    """Return the launch of the rings."""
    identity = rings[0][1].identity
    return identity.launch, identity.attempt


def made_unix_ns(rings: Rings) -> int:
    """Return when the newest of the rings was created, by this node's clock."""
    return max(reader.identity.created_unix_ns for _, reader in rings)


def _are_further_ranks(rings: Rings, attempt: LocalAttempt) -> bool:
    """Return whether these are further ranks of the attempt, under another launcher.

    This is so when several nodes of a run share a machine: ranks differ and both are alive. An
    elastic launcher ends all its ranks before it restarts them under other numbers.
    """
    ranks = {reader.identity.rank for _, reader in rings}
    return (
        attempt.alive
        and attempt.end is EndReason.RUNNING
        and attempt.identity.world_size == rings[0][1].identity.world_size
        and ranks.isdisjoint(attempt.sources)
        and any_alive(rings)
    )


def _are_descendants(rings: Rings, attempt: LocalAttempt) -> bool:
    """Return whether a rank of the attempt started the processes that write the rings."""
    pids = {source.identity.pid for source in attempt.sources.values()}
    return any(pids & set(_ancestors(reader.writer_pid())) for _, reader in rings)


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the ancestors of a process, as far as /proc shows them."""
    for _ in range(_GENERATIONS):
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            pid = int(text.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return
        if pid <= 1:
            return
        yield pid


def _are_successors(rings: Rings, attempt: LocalAttempt) -> bool:
    """Return whether these are the next attempt although they are older, or appear to be.

    The host's clock was set back in between, or they are of a job that has waited meanwhile.
    """
    running = attempt.alive and attempt.end is EndReason.RUNNING
    return not running and any_alive(rings)


def committed(reader: RingReader) -> int:
    """Return how many steps a rank has written; 0 if its ring cannot be read."""
    try:
        return reader.state.committed_sequence
    except (RingError, ValueError):
        return 0


def any_alive(rings: Rings) -> bool:
    """Return whether the writer of one of the rings is alive."""
    return any(reader.writer_alive() for _, reader in rings)


FEATURE = "another job of this name on this node"


@dataclass(slots=True)
class _ConflictingJob:
    rings: Rings
    counted: dict[Path, int]
    """Step up to which records were counted as lost, by ring."""


class NameConflicts:
    """Holds the rings of jobs that wait until the current one is over, unless they end first."""

    def __init__(self) -> None:
        self.lost = 0
        """Records that are not read."""
        self._waiting: list[_ConflictingJob] = []

    @property
    def active(self) -> bool:
        """Whether a job is waiting."""
        return bool(self._waiting)

    @property
    def counted(self) -> dict[str, int]:
        """By ring of those that wait, the step up to which records are counted as lost."""
        return {str(path): step for job in self._waiting for path, step in job.counted.items()}

    def add(self, rings: Rings, *, counted: Mapping[Path, int]) -> None:
        """Add a job that has to wait.

        counted: by ring, the step up to which its records are counted as lost, if it has waited
        before, also under an earlier agent.
        """
        identity = rings[0][1].identity
        log.error(
            "another job named %r runs on this node (process %d): it is not recorded as long as "
            "the first one runs. Give each a name of its own (MP_AGENT_RUN)",
            identity.run,
            identity.pid,
        )
        self._waiting.append(
            _ConflictingJob(rings, {path: counted.get(path, 0) for path, _ in rings})
        )

    def join(self, rings: Rings) -> bool:
        """Add rings that belong to a waiting job; return whether they do."""
        launch = rings[0][1].identity.launch
        for job in self._waiting:
            if job.rings[0][1].identity.launch == launch:
                job.rings = [*job.rings, *rings]
                job.counted.update({path: 0 for path, _ in rings})
                return True
        return False

    def poll(self) -> None:
        """Count what the waiting jobs have written; drop those that have ended."""
        for job in self._waiting:
            alive = any_alive(job.rings)
            for path, reader in job.rings:
                written = committed(reader)
                self.lost += max(written - job.counted[path], 0)
                job.counted[path] = max(written, job.counted[path])
            if not alive:
                _discard(job.rings)
                job.rings = []
        self._waiting = [job for job in self._waiting if job.rings]

    def release(self) -> Iterable[tuple[Rings, dict[Path, int]]]:
        """Yield and remove the waiting jobs, oldest first, with their lost steps by ring."""
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            yield job.rings, job.counted

    def close(self) -> None:
        """Close all rings."""
        for job in self._waiting:
            for _, reader in job.rings:
                reader.close()
        self._waiting = []


def _discard(rings: Rings) -> None:
    for path, reader in rings:
        log.warning("rank %d of the other job has ended unread", reader.identity.rank)
        reader.close()
        remove_ring(path)
