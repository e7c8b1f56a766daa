"""Ranks without live data: those that have ended, and those that never had a ring."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.node.collect.attempt import LocalAttempt
from mp_agent.node.collect.rank_source import RankSource
from mp_agent.records.steps import EndReason

log = logging.getLogger("mp_agent.node")

GRACE_SECONDS = 30.0
"""Time after the other ranks' first steps within which a rank may still appear."""


@dataclass(slots=True)
class DepartedRanks:
    """Tracks when the ranks of an attempt ended, so that their last values expire."""

    linger_seconds: float
    _ended_seconds: dict[int, float] = field(default_factory=dict)

    def update(self, sources: Mapping[int, RankSource], now_seconds: float) -> None:
        """Note which ranks have ended by now."""
        for rank, source in sources.items():
            if source.end is not EndReason.RUNNING:
                self._ended_seconds.setdefault(rank, now_seconds)

    def begin_attempt(self) -> None:
        """Forget all ranks: the next attempt reuses their numbers."""
        self._ended_seconds.clear()

    def expired(self, now_seconds: float) -> frozenset[int]:
        """Return the ranks that ended at least `linger_seconds` ago."""
        return frozenset(
            rank
            for rank, ended_seconds in self._ended_seconds.items()
            if now_seconds - ended_seconds >= self.linger_seconds
        )


class UnwatchedRanks:
    """Warns, once per set of ranks, of ranks without a ring while others make steps."""

    def __init__(self) -> None:
        self._since_seconds: float | None = None
        self._reported: frozenset[int] = frozenset()

    def check(self, run: str, attempt: LocalAttempt, now_seconds: float) -> None:
        """Compare the ranks that belong to this node with those that have a ring."""
        missing = frozenset(attempt.expected_ranks - set(attempt.sources))
        if not missing or missing == self._reported or not attempt.newest_sequence:
            self._since_seconds = None
            return
        if self._since_seconds is None:
            self._since_seconds = now_seconds
        if now_seconds - self._since_seconds >= GRACE_SECONDS:
            self._reported = missing
            log.warning(
                "run %s: not watched on this node: rank %s. Set MP_AGENT_ATTACH=1 for the job, or "
                "call mp_agent.init() in every rank",
                run,
                ", ".join(map(str, sorted(missing))),
            )
