"""Which rank keeps the others waiting, by the time before its first collective of a step."""

from collections.abc import Mapping
from statistics import median_low

import numpy as np

from mp_agent.records.health import Straggler
from mp_agent.records.steps import FloatArray

BLOCK_STEPS = 16
"""Steps of which each rank's median counts: a hiccup of one step makes nobody a straggler."""


class StragglerWatch:
    """Compares the ranks over blocks of steps; `worst` is of the last whole block.

    Waiting is not slowness: step times are equal on all ranks, the time before the first
    collective is the rank's own.
    """

    def __init__(self, worst: Straggler | None = None) -> None:
        self.worst = worst
        self._ranks: tuple[int, ...] = ()
        self._rows: list[FloatArray] = []

    def fold(self, compute_seconds: Mapping[int, float]) -> None:
        """Take a step in. With ranks that come or go a new block begins."""
        if len(compute_seconds) < 2:
            return
        ranks = tuple(sorted(compute_seconds))
        if ranks != self._ranks:
            self._ranks, self._rows = ranks, []
        self._rows.append(np.array([compute_seconds[rank] for rank in ranks]))
        if len(self._rows) >= BLOCK_STEPS:
            self.worst = slowest(ranks, np.median(np.stack(self._rows), axis=0).tolist())
            self._rows = []


def slowest(ranks: tuple[int, ...], seconds: list[float]) -> Straggler | None:
    """Return the rank that takes longest, against the (low) median of all; None at a median of 0.

    Of two ranks the faster one is the measure, which a mean of both would not be.
    """
    usual = median_low(seconds)
    index = max(range(len(seconds)), key=seconds.__getitem__)
    if usual <= 0.0:
        return None
    return Straggler(
        rank=ranks[index],
        slowdown=seconds[index] / usual,
        delay_seconds=seconds[index] - usual,
    )
