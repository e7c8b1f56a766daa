"""Names the ranks of this node that train and are not watched."""

import logging

from mp_agent.node.collect.attempt import LocalAttempt

log = logging.getLogger("mp_agent.node")

PATIENCE_SECONDS = 30.0
"""How long after the others' first steps a rank may still appear."""


class UnwatchedRanks:
    """Says, once for the same ranks, which have no ring although others make steps."""

    def __init__(self) -> None:
        self._since_seconds: float | None = None
        self._named: frozenset[int] = frozenset()

    def look(self, run: str, attempt: LocalAttempt, now_seconds: float) -> None:
        """Compare the ranks that the node should have with those that were seen."""
        missing = frozenset(attempt.expected_ranks - set(attempt.sources))
        if not missing or missing == self._named or not attempt.newest_sequence:
            self._since_seconds = None
            return
        if self._since_seconds is None:
            self._since_seconds = now_seconds
        if now_seconds - self._since_seconds >= PATIENCE_SECONDS:
            self._named = missing
            log.warning(
                "run %s: not watched on this node: rank %s. Set MP_AGENT_ATTACH=1 for the job, or "
                "call mp_agent.init() in every rank",
                run,
                ", ".join(map(str, sorted(missing))),
            )
