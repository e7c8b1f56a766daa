"""Finds the rank that delays the others, by its time before the first collective of a step."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.health import Laggard, Straggler
from mp_agent.records.merged import MergedStep
from mp_agent.records.reports.rows import RankStatus
from mp_agent.records.steps import EndReason, FloatArray, Phase

STANDING_SECONDS = 30.0
STANDING_STEPS = 3.0
"""A run is stalled when its last step is longer ago than both of these: ranks that train are never
all in the same phase."""

_BEFORE_STEP = {Phase.STARTING, Phase.EVAL, Phase.CHECKPOINT, Phase.OTHER}


def laggards(
    ranks: Sequence[RankStatus],
    last: MergedStep | None,
    usual_seconds: float | None,
    time_unix_seconds: float,
) -> tuple[Laggard, ...]:
    """Return the ranks that are behind the furthest one, once the run is stalled.

    A rank whose process is gone without completing lags in any case. While a rank starts,
    evaluates or saves a checkpoint, the others wait for it and no rank lags.
    """
    if last is not None:
        delay_seconds = max(STANDING_SECONDS, STANDING_STEPS * (usual_seconds or 0.0))
        if time_unix_seconds - last.time_unix_seconds < delay_seconds:
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


BLOCK_STEPS = 16
"""Steps per block; each rank's median counts, so that a single slow step does not."""
BLOCKS = 4
"""A rank must be slow in each of this many blocks: with many ranks, one is slow in any block."""


@dataclass(kw_only=True)
class StragglerTracker(Tracker):
    """Compares the ranks over blocks of steps; `worst` is that of the last complete blocks.

    Step times include waiting and are equal on all ranks; the time before the first collective is
    the rank's own. Only `worst` is stored: blocks start over with the node agent.
    """

    worst: Straggler | None = None

    def __post_init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._rows: list[FloatArray] = []
        self._blocks: deque[FloatArray] = deque(maxlen=BLOCKS)

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, unless it was skipped or a rank is missing."""
        if not step.skipped and step.coverage == 1.0:
            self.fold(step.compute_seconds)

    def health(self, context: AccountContext) -> Mapping[str, Any]:
        """Return the slowest rank."""
        return {"straggler": self.worst}

    def fold(self, compute_seconds: Mapping[int, float]) -> None:
        """Add a step. When ranks come or go, all blocks start over."""
        if len(compute_seconds) < 2:
            return
        ranks = tuple(sorted(compute_seconds))
        if ranks != self._ranks:
            self._ranks, self._rows = ranks, []
            self._blocks.clear()
        self._rows.append(np.array([compute_seconds[rank] for rank in ranks]))
        if len(self._rows) >= BLOCK_STEPS:
            self._blocks.append(np.median(np.stack(self._rows), axis=0))
            self._rows = []
            self.worst = slowest(ranks, self._blocks)


def slowest(ranks: Sequence[int], blocks: Sequence[FloatArray]) -> Straggler | None:
    """Return the slowest rank relative to the (low) median of all; None if the median is 0.

    blocks: seconds per rank [R]. Each rank counts with its fastest block. With two ranks the
    reference is the faster one, not their mean.
    """
    usual = [median_low(block.tolist()) for block in blocks]
    if min(usual) <= 0.0:
        return None
    slowdowns = np.min([block / u for block, u in zip(blocks, usual, strict=True)], axis=0)
    delays = np.min([block - u for block, u in zip(blocks, usual, strict=True)], axis=0)
    index = int(np.argmax(slowdowns))
    return Straggler(
        rank=ranks[index],
        slowdown=float(slowdowns[index]),
        delay_seconds=float(delays[index]),
    )
