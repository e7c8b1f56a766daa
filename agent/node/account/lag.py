"""Which ranks stand behind the others while the run makes no step."""

from collections.abc import Sequence

from mp_agent.records.health import Laggard
from mp_agent.records.merged import MergedStep
from mp_agent.records.rows import RankStatus
from mp_agent.records.steps import EndReason, Phase

STANDING_SECONDS = 30.0
STANDING_STEPS = 3.0
"""A run stands when its last step is longer ago than this, and than so many usual steps: ranks
that train are never all in the same phase."""

_BEFORE_STEP = {Phase.STARTING, Phase.EVAL, Phase.CHECKPOINT, Phase.OTHER}


def laggards(
    ranks: Sequence[RankStatus],
    last: MergedStep | None,
    usual_seconds: float | None,
    time_unix_seconds: float,
) -> tuple[Laggard, ...]:
    """Return the ranks that have not come as far as the furthest, once the run stands.

    A rank that is gone and did not complete lags whatever it did last. While a rank starts,
    evaluates or saves a checkpoint the others rightly wait, and nobody lags.
    """
    if last is not None:
        patience_seconds = max(STANDING_SECONDS, STANDING_STEPS * (usual_seconds or 0.0))
        if time_unix_seconds - last.time_unix_seconds < patience_seconds:
            return ()
    running = [status for status in ranks if status.end is EndReason.RUNNING]
    gone = {status.rank: status for status in ranks if _died(status)}
    if not running or any(status.phase in _BEFORE_STEP for status in running):
        return ()
    furthest = max(map(_position, running))
    behind = [status for status in running if _position(status) < furthest]
    found = [
        *(Laggard(rank=rank, phase="gone") for rank in gone),
        *(Laggard(rank=s.rank, phase=s.phase_name) for s in behind),
    ]
    return tuple(sorted(found, key=lambda laggard: laggard.rank))


def _position(status: RankStatus) -> tuple[int, int]:
    return (status.started_sequence, status.phase)


def _died(status: RankStatus) -> bool:
    return status.end not in (EndReason.RUNNING, EndReason.COMPLETED)
