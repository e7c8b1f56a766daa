"""Which attempt of a run new rings belong to: the present one, the next, or one that is over."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from mp_agent.node.attempt import Attempt
from mp_agent.records.steps import EndReason
from mp_agent.ring.reader import RingReader

Launch = tuple[str, int]
"""Launcher and attempt."""

Rings = list[tuple[Path, RingReader]]
"""Rings of one launch, at least one."""


class Belonging(Enum):
    """Where rings of a launch belong."""

    PRESENT = auto()
    NEXT = auto()
    OVER = auto()


@dataclass(slots=True)
class Launches:
    """The launches that make up the present attempt of a run, usually one."""

    known: set[Launch] = field(default_factory=set)
    newest_unix_ns: int = 0
    """When the newest of their rings was made; older launches are over."""

    def belonging(self, rings: Rings, attempt: Attempt) -> Belonging:
        """Return where the rings of one launch belong; attempt: the present one."""
        if launch_of(rings) in self.known or _beside(rings, attempt):
            return Belonging.PRESENT
        if made_unix_ns(rings) > self.newest_unix_ns or _succeed(rings, attempt):
            return Belonging.NEXT
        return Belonging.OVER

    def begin_attempt(self, rings: Rings) -> None:
        """Forget the launches of the attempt before; the next one begins with these rings."""
        self.known, self.newest_unix_ns = set(), 0
        self.add(rings)

    def add(self, rings: Rings) -> None:
        """Count the rings among those of the present attempt."""
        self.known.add(launch_of(rings))
        self.newest_unix_ns = max(self.newest_unix_ns, made_unix_ns(rings))


def by_launch(rings: Iterable[tuple[Path, RingReader]]) -> list[Rings]:
    """Return the rings grouped by launch, the group made last at the end."""
    groups: dict[Launch, Rings] = {}
    for path, reader in rings:
        launch = (reader.identity.launch, reader.identity.attempt)
        groups.setdefault(launch, []).append((path, reader))
    return sorted(groups.values(), key=made_unix_ns)


def launch_of(rings: Rings) -> Launch:
    """Return the launch that made the rings."""
    identity = rings[0][1].identity
    return identity.launch, identity.attempt


def made_unix_ns(rings: Rings) -> int:
    """Return when the newest of the rings was made, by this node's clock."""
    return max(reader.identity.created_unix_ns for _, reader in rings)


def _beside(rings: Rings, attempt: Attempt) -> bool:
    """Return whether these are further ranks of the attempt, under another launcher.

    So it is when several nodes of a run are one machine: ranks differ and both are alive. An
    elastic launcher ends all its ranks before it starts them under other numbers.
    """
    ranks = {reader.identity.rank for _, reader in rings}
    return (
        attempt.alive
        and attempt.end is EndReason.RUNNING
        and attempt.identity.world_size == rings[0][1].identity.world_size
        and ranks.isdisjoint(attempt.sources)
        and _any_alive(rings)
    )


def _succeed(rings: Rings, attempt: Attempt) -> bool:
    """Return whether these are the next attempt although they look older.

    So it is when the host's clock was set back in between.
    """
    return attempt.seen and not attempt.alive and _any_alive(rings)


def _any_alive(rings: Rings) -> bool:
    return any(reader.writer_alive() for _, reader in rings)
