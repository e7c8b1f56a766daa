"""Finds the one rank whose losses are unlike those of all others, and of its own past."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.health import OddRank
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import FloatArray

_WINDOW_STEPS = 64
_LEVEL_STEPS = 32
_INTERVAL_STEPS = 8
"""Steps between two comparisons."""
_OUTLIERS = 3
_FAR = 4.0
"""Distance of an outlier from the usual loss, in that of the highest loss of all other ranks."""
_UNLIKE = 2.0
"""Factor between the losses of a rank and those of others that chance does not make for long."""


class _Found(NamedTuple):
    outliers: OddRank | None = None
    level: OddRank | None = None


@dataclass(kw_only=True)
class RankLossTracker(Tracker):
    """Compares the last losses of all ranks. Only what was found last is stored."""

    outliers: OddRank | None = None
    """The rank with single losses far above all that the others had."""
    level: OddRank | None = None
    """The rank whose losses are all far from those of the others."""

    def __post_init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._rows: deque[FloatArray] = deque(maxlen=_WINDOW_STEPS)

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, unless it was skipped or a rank is missing."""
        if step.skipped or step.coverage < 1.0 or len(step.losses) < 2:
            return
        if context.progress.misreadings.scaled:
            return
        self.fold(step.losses, step.sequence)

    def fold(self, losses: Mapping[int, float], sequence: int) -> None:
        """Add a step. When ranks come or go, the window starts over."""
        ranks = tuple(sorted(losses))
        if ranks != self._ranks:
            self._ranks = ranks
            self._rows.clear()
        self._rows.append(np.array([losses[rank] for rank in ranks]))
        if sequence % _INTERVAL_STEPS or len(self._rows) < _LEVEL_STEPS:
            return
        window_WR = np.stack(self._rows)
        self.outliers = _outliers(ranks, window_WR)
        self.level = _unlike(ranks, window_WR[-_LEVEL_STEPS:])


def _outliers(ranks: tuple[int, ...], window_WR: FloatArray) -> OddRank | None:
    """Return the rank with the highest loss if several of its own are beyond all others'."""
    center = float(np.median(window_WR))
    highest_R = window_WR.max(axis=0)
    place = int(highest_R.argmax())
    others = float(np.delete(highest_R, place).max())
    bound = max(center + _FAR * (others - center), _UNLIKE * center)
    own_W = window_WR[:, place]
    count = int((own_W > bound).sum())
    if center <= 0.0 or not _OUTLIERS <= count <= len(own_W) // 2:
        return None
    return OddRank(
        rank=ranks[place], steps=count, loss=float(highest_R[place]), usual=center, highest=others
    )


def _unlike(ranks: tuple[int, ...], window_WR: FloatArray) -> OddRank | None:
    """Return the rank three quarters of whose losses are twice those of all others, or half."""
    if window_WR.min() <= 0.0:
        return None
    low_R, middle_R, high_R = np.quantile(window_WR, (0.25, 0.5, 0.75), axis=0)
    above = int(low_R.argmax())
    # Of two ranks with different losses the higher one has the worse data, or labels.
    candidates = [above] if len(ranks) == 2 else [above, int(high_R.argmin())]
    for place in candidates:
        lower, higher = np.delete(low_R, place).min(), np.delete(high_R, place).max()
        if low_R[place] > _UNLIKE * higher or _UNLIKE * high_R[place] < lower:
            return OddRank(
                rank=ranks[place],
                steps=len(window_WR),
                loss=float(middle_R[place]),
                usual=float(np.median(np.delete(middle_R, place))),
                highest=float(higher),
            )
    return None
