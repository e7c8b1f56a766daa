"""Derives from ranks' markers and locks whether a run is alive, how it ended and how far it is."""

from collections.abc import Sequence

from mp_agent.records.reports.rows import RankStatus
from mp_agent.records.steps import EndReason, Phase, RankState

_BETWEEN_STEPS = (Phase.EVAL, Phase.CHECKPOINT, Phase.OTHER)
_WORST_FIRST = (EndReason.FAILED, EndReason.KILLED, EndReason.UNKNOWN, EndReason.COMPLETED)


def rank_end(state: RankState, *, alive: bool, exit_status: int | None = None) -> EndReason:
    """Return how a rank ended; RUNNING while it runs.

    An end marker counts although the process may still wait for its last scrape. The exit status
    of a process that is gone takes precedence; one that left neither was killed.
    """
    if not alive and exit_status is not None:
        return EndReason.FAILED if exit_status else EndReason.COMPLETED
    if state.end_reason is not EndReason.RUNNING or alive:
        return state.end_reason
    return EndReason.KILLED


def run_end(ranks: Sequence[EndReason]) -> EndReason:
    """Return how the run ended: the worst of its ranks' ends; RUNNING while one runs."""
    if not ranks or EndReason.RUNNING in ranks:
        return EndReason.RUNNING
    return next(reason for reason in _WORST_FIRST if reason in ranks)


def furthest_behind(ranks: Sequence[RankStatus]) -> RankStatus | None:
    """Return the running rank with the least progress; among equals, the lowest rank.

    Evaluation, checkpointing and other phases count as before the forward pass of a step.
    """
    running = (status for status in ranks if status.end is EndReason.RUNNING)
    return min(running, key=_progress, default=None)


def _progress(status: RankStatus) -> tuple[int, int, int]:
    return status.started_sequence, _place(status), status.rank


def _place(status: RankStatus) -> int:
    return Phase.STARTING if status.phase in _BETWEEN_STEPS else status.phase
