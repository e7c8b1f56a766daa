"""Assigns new rings to the current attempt, to the next one, or discards them."""

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
    """Start to read the rings of one launch, unless it is already over or has to wait.

    finish_attempt: accounts for the rest of the current attempt; called before the next one begins.
    lost: by ring, the step up to which its records count as lost and are not read.
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
    """Count the records of jobs with a conflicting name; admit them once the first job is over."""
    if not state.name_conflicts.active:
        return
    state.uncommitted = True
    if state.attempt.end is EndReason.RUNNING and state.attempt.alive:
        state.name_conflicts.poll()
        return
    for rings, lost in state.name_conflicts.release():
        admit(rings, state, finish_attempt=finish_attempt, lost=lost)


def _begin_attempt(rings: Rings, state: RunState) -> None:
    """Replace the attempt; its rings are deleted only once their contents are in the ledger."""
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
    """Close the rings; delete them unless they are in use.

    Rings that an earlier agent has read completely only remained to be deleted. The records in
    other rings will not be read: they count as lost.
    """
    read = launch_of(rings) in state.launches.read
    for path, reader in rings:
        if not read:
            state.count_lost(committed(reader))
        if not reader.writer_alive():
            remove_ring(path)
        reader.close()
