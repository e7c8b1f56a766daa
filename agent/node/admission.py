"""Lets new rings in: to the present attempt, or as the next one, or not at all."""

import logging
from collections.abc import Callable

from mp_agent.node.finder import remove_ring
from mp_agent.node.launches import Belonging, Rings
from mp_agent.node.run_state import RunState
from mp_agent.node.source import RankSource

log = logging.getLogger("mp_agent.node")


def admit(rings: Rings, state: RunState, *, settle: Callable[[], None]) -> None:
    """Read the rings of one launch from now on, unless it was over before.

    settle: takes in what the present attempt still yields; called before the next one begins.
    """
    belonging = state.launches.belonging(rings, state.attempt)
    if belonging is Belonging.OVER:
        _discard(rings)
        return
    if belonging is Belonging.NEXT:
        settle()
        _begin_attempt(rings, state)
    state.launches.add(rings)
    state.uncommitted = True
    after, layers_after = state.exchange.closed
    for path, reader in rings:
        state.attempt.add(RankSource(path, reader, after=after, layers_after=layers_after))


def _begin_attempt(rings: Rings, state: RunState) -> None:
    """Replace the attempt; its rings are deleted only once what they said is in the ledger."""
    before = state.attempt
    state.begin_attempt(rings)
    state.commit()
    number = rings[0][1].identity.attempt
    for source in before.sources.values():
        log.info("rank %d: attempt %d takes over", source.identity.rank, number)
        source.close()
        remove_ring(source.path)


def _discard(rings: Rings) -> None:
    """Let go of the rings; delete them unless they are in use."""
    for path, reader in rings:
        if not reader.writer_alive():
            remove_ring(path)
        reader.close()
