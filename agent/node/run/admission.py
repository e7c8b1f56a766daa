"""Lets new rings in: to the present attempt, or as the next one, or not at all."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from mp_agent.node.collect.rank_source import RankSource
from mp_agent.node.run.launches import LaunchStatus, Rings, committed, launch_of
from mp_agent.node.run.ring_finder import remove_ring
from mp_agent.node.run.state import RunState
from mp_agent.records.steps import EndReason

log = logging.getLogger("mp_agent.node")


def admit(
    rings: Rings,
    state: RunState,
    *,
    finish_attempt: Callable[[], None],
    lost: Mapping[Path, int] | None = None,
) -> None:
    """Read the rings of one launch from now on, unless it was over before or has to wait.

    finish_attempt: takes in what the present attempt still yields; called before the next one begins.
    lost: by ring, up to which step nothing is read any more.
    """
    if state.name_conflicts.join(rings):
        return
    status = state.launches.status_of(rings, state.attempt)
    if status is LaunchStatus.NAME_CONFLICT:
        state.name_conflicts.add(rings, counted=lost, counted_before=state.is_successor)
        return
    if status is LaunchStatus.OVER:
        _discard(rings, state)
        return
    if status is LaunchStatus.NEXT:
        finish_attempt()
        _begin_attempt(rings, state)
    state.launches.add(rings)
    state.uncommitted = True
    after, layers_after = state.member.closed
    for path, reader in rings:
        begin = max(after, (lost or {}).get(path, 0))
        state.attempt.add(RankSource(path, reader, after=begin, layers_after=layers_after))


def poll_name_conflicts(state: RunState, *, finish_attempt: Callable[[], None]) -> None:
    """Count what jobs of the same name write in vain; let them in once the first one is over."""
    if not state.name_conflicts.active:
        return
    state.uncommitted = True
    if state.attempt.end is EndReason.RUNNING and state.attempt.alive:
        state.name_conflicts.poll()
        return
    for rings, lost in state.name_conflicts.release():
        admit(rings, state, finish_attempt=finish_attempt, lost=lost)


def _begin_attempt(rings: Rings, state: RunState) -> None:
    """Replace the attempt; its rings are deleted only once what they said is in the ledger."""
    before = state.attempt
    state.begin_attempt(rings)
    on_disk = state.commit()
    number = rings[0][1].identity.attempt
    for source in before.sources.values():
        log.info("rank %d: attempt %d takes over", source.identity.rank, number)
        source.close()
        if on_disk:
            remove_ring(source.path)


def _discard(rings: Rings, state: RunState) -> None:
    """Let go of the rings; delete them unless they are in use.

    Those that an agent before this one has read to the end were only not deleted yet. What the
    others hold nobody reads any more: it counts as lost.
    """
    read = launch_of(rings) in state.launches.read
    for path, reader in rings:
        if not read:
            state.count_lost(committed(reader))
        if not reader.writer_alive():
            remove_ring(path)
        reader.close()
