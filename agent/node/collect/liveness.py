"""What the ranks' markers and locks say of the run: does it live, how did it end, where is it."""

from collections.abc import Sequence

from mp_agent.records.rows import RankStatus
from mp_agent.records.steps import EndReason, Phase, RankState

_BETWEEN_STEPS = (Phase.EVAL, Phase.CHECKPOINT, Phase.OTHER)
_GRAVITY = (EndReason.FAILED, EndReason.KILLED, EndReason.UNKNOWN, EndReason.COMPLETED)


def rank_end(state: RankState, *, alive: bool, exit_status: int | None = None) -> EndReason:
    """Return how a rank ended; RUNNING while it goes on.

    An end marker counts as the end although the process may wait for its last scrape. The exit
    status of a process that is gone counts more; one that is gone without either was killed.
    """
    if not alive and exit_status is not None:
        return EndReason.FAILED if exit_status else EndReason.COMPLETED
    if state.end_reason is not EndReason.RUNNING or alive:
        return state.end_reason
    return EndReason.KILLED


def run_end(ranks: Sequence[EndReason]) -> EndReason:
    """Return how the run ended: the gravest of its ranks' ends; RUNNING while one goes on."""
    if not ranks or EndReason.RUNNING in ranks:
        return EndReason.RUNNING
    return next(reason for reason in _GRAVITY if reason in ranks)


def furthest_behind(ranks: Sequence[RankStatus]) -> RankStatus | None:
    """Return the status of the rank with the least progress that runs; of equal ones the lowest's.

    Evaluation, checkpointing and the like come before the forward pass of the same step.
    """
    running = (status for status in ranks if status.end is EndReason.RUNNING)
    return min(running, key=_progress, default=None)


def _progress(status: RankStatus) -> tuple[int, int, int]:
    return status.started_sequence, _place(status), status.rank


def _place(status: RankStatus) -> int:
    return Phase.STARTING if status.phase in _BETWEEN_STEPS else status.phase
