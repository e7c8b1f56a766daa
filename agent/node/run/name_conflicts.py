"""Jobs with the same name as a run that train at the same time: not read, only counted."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mp_agent.node.run.launches import Rings, any_alive, committed
from mp_agent.node.run.ring_finder import remove_ring

log = logging.getLogger("mp_agent.node")

FEATURE = "another job of this name on this node"


@dataclass(slots=True)
class _ConflictingJob:
    rings: Rings
    counted: dict[Path, int]
    """By ring, the step up to which records were counted as lost."""


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

    def add(
        self, rings: Rings, *, counted: Mapping[Path, int] | None, counted_before: bool
    ) -> None:
        """Add a job that has to wait.

        counted: by ring, the step up to which its records are counted as lost, if it has waited
        before; counted_before: an earlier agent has counted what it has written so far.
        """
        identity = rings[0][1].identity
        log.error(
            "another job named %r runs on this node (process %d): it is not recorded as long as "
            "the first one runs. Give each a name of its own (MP_AGENT_RUN)",
            identity.run,
            identity.pid,
        )
        if counted is None:
            counted = {path: committed(reader) if counted_before else 0 for path, reader in rings}
        self._waiting.append(_ConflictingJob(rings, dict(counted)))

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
