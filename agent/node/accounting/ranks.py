"""The pace of the ranks, which of them stall or straggle, and which has odd losses."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.node.accounting.windows import median
from mp_agent.records.health import Laggard, OddRank, Straggler
from mp_agent.records.merged import MergedStep, RankValues
from mp_agent.records.node_report import RankStatus
from mp_agent.records.steps import EndReason, FloatArray, Phase

_TRAINING = frozenset(
    phase.name.lower() for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
)
_IN_TRAINING = "training"
_HALF_LIFE_SECONDS = 12 * 3600.0
_KINDS_AT_MOST = 16


@dataclass(slots=True)
class _Longest:
    """The longest pause of a kind, at its full length when it ended."""

    seconds: float
    ended_seconds: float

    def decayed(self, now_seconds: float) -> float:
        age_seconds = max(now_seconds - self.ended_seconds, 0.0)
        return self.seconds * float(0.5 ** (age_seconds / _HALF_LIFE_SECONDS))


class Standstill:
    """Tracks when the run last completed a step or changed the kind of its phase.

    A pause in training that ended was no hang: a rollout of an RL trainer, an unmarked evaluation.
    The longest one is remembered and decays, since such pauses recur; likewise the longest
    evaluation, the longest checkpoint and that of each other phase outside training.
    Times are those of a monotonic clock.
    """

    def __init__(self) -> None:
        """Start without any step."""
        self._mark: tuple[str, int, str] | None = None
        self._since_seconds = 0.0
        self._longest: dict[str, _Longest] = {}
        """Longest pauses by the kind of phase during them."""

    def update(self, attempt: str, sequence: int, phase_name: str, now_seconds: float) -> None:
        """Note the run's attempt, its last step, and the phase of the rank furthest behind."""
        kind = _IN_TRAINING if phase_name in _TRAINING else phase_name
        mark = (attempt, sequence, kind)
        if mark == self._mark:
            return
        before = self._mark
        if before is not None and before[0] == attempt and before[1]:
            self._remember(before[2], now_seconds - self._since_seconds, now_seconds)
        self._mark, self._since_seconds = mark, now_seconds

    def seconds(self, now_seconds: float) -> float | None:
        """Return the time since the last progress; None before the first update."""
        return None if self._mark is None else max(now_seconds - self._since_seconds, 0.0)

    def longest_pause_seconds(self, now_seconds: float) -> float:
        """Return the longest pause in training that ended, decayed with its age."""
        return self._decayed(_IN_TRAINING, now_seconds) or 0.0

    def longest_phase_seconds(self, now_seconds: float) -> float | None:
        """Return the longest of the current phase outside training, decayed with its age.

        None in training, and if no such phase has ended since the first step.
        """
        if self._mark is None or self._mark[2] == _IN_TRAINING:
            return None
        return self._decayed(self._mark[2], now_seconds)

    def _decayed(self, kind: str, now_seconds: float) -> float | None:
        longest = self._longest.get(kind)
        return None if longest is None else longest.decayed(now_seconds)

    def _remember(self, kind: str, seconds: float, now_seconds: float) -> None:
        known = self._longest.get(kind)
        if known is None and len(self._longest) >= _KINDS_AT_MOST:
            return
        if known is None or seconds >= known.decayed(now_seconds):
            self._longest[kind] = _Longest(seconds, now_seconds)


_STEPS = 64


@dataclass(slots=True, kw_only=True)
class Pace(Tracker):
    """Remembers the last step times; a compilation or a checkpoint does not affect the median."""

    seconds: list[float] = field(default_factory=list)

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        self.fold(step.get("step_seconds"))

    def fold(self, step_seconds: float | None) -> None:
        """Add a step's time, if it is known."""
        if step_seconds is not None:
            self.seconds = [*self.seconds[1 - _STEPS :], step_seconds]

    @property
    def usual_seconds(self) -> float | None:
        """The median; None before the first."""
        return median(self.seconds) if self.seconds else None


_NEVER_STEPS = 2
"""Consecutive steps on which no two ranks have the gradients that a wrapper says are the same: the
weights of the second one show whether something else keeps them equal."""
_LOST_STEPS = 3
"""Such steps of a run in which gradients were reduced before."""
_PERIODS = 4
"""Periods of averaging that a run must exceed that has averaged its weights before."""
_PLAIN_FACTOR = 8
"""So many times longer may copies that no wrapper explains train alone: DiLoCo does on purpose."""


@dataclass(slots=True, kw_only=True)
class ReductionTracker(Tracker):
    """For how long ranks that hold copies have stepped each with its own gradients.

    Local SGD and its relatives do so on purpose, until they average the weights.
    """

    steps: int = 0
    """Updates since the copies were last equal."""
    looks: int = 0
    """Those of them whose gradients were looked at."""
    left_out: int = 0
    """Updates since then or since the last look, from weights that were not equal."""
    longest: int = 0
    """The longest such stretch that ended in equal copies."""
    unreduced: bool = False
    """Whether nothing but a mistake explains them."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step; of one that was skipped nothing follows."""
        found = step.reduction
        if found is None or step.skipped:
            return
        if not found.measured:
            self._leave_out(equal=found.equal_before)
            return
        if not found.apart:
            self._end()
            # An update from equal weights is the first that leaves them different.
            self.steps = self.looks = int(found.parts)
            return
        self.steps += self.left_out + 1
        self.looks += 1
        self.left_out = 0
        limit = context.thresholds["unreduced_steps"] * (1 if found.wrapped else _PLAIN_FACTOR)
        lost = self.looks >= (_LOST_STEPS if found.reduced else _NEVER_STEPS)
        lost &= found.contradicted
        self.unreduced = lost or self.steps >= max(limit, _PERIODS * self.longest)

    def _leave_out(self, *, equal: bool) -> None:
        """Add an update whose gradients were not looked at; equal: from equal weights."""
        if equal:
            self._end()
        self.left_out += 1  # counted with the next look, if that finds them apart

    def _end(self) -> None:
        """Let the stretch end in equal copies."""
        self.longest = max(self.longest, self.steps + self.left_out)
        self.steps = self.looks = self.left_out = 0
        self.unreduced = False

    @property
    def unreduced_steps(self) -> int:
        """Updates since the copies were last equal, up to the newest, once a mistake is sure."""
        return self.steps + self.left_out if self.unreduced else 0

    def next_attempt(self) -> "ReductionTracker":
        """Return the state of the next attempt, which averages as often."""
        return type(self)(longest=self.longest)


STANDING_SECONDS = 30.0
STANDING_STEPS = 3.0
"""A run is stalled when its last step is longer ago than both of these: ranks that train are never
all in the same phase."""

_BEFORE_STEP = {Phase.STARTING, Phase.EVAL, Phase.CHECKPOINT, Phase.OTHER}


def stalled(standing_seconds: float | None, usual_seconds: float | None) -> bool:
    """Return whether the run made no progress for so long that ranks may lag.

    standing_seconds: by a monotonic clock; None where nothing is known of any progress.
    """
    if standing_seconds is None:
        return True
    return standing_seconds >= max(STANDING_SECONDS, STANDING_STEPS * (usual_seconds or 0.0))


def laggards(ranks: Sequence[RankStatus]) -> tuple[Laggard, ...]:
    """Return the ranks of a stalled run that are behind the furthest one.

    A rank whose process is gone without completing lags in any case. While a rank starts,
    evaluates or saves a checkpoint, the others wait for it and no rank lags.
    """
    running = [status for status in ranks if status.end is EndReason.RUNNING]
    if not running or any(status.phase in _BEFORE_STEP for status in running):
        return ()
    gone = {status.rank for status in ranks if _died(status)}
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


_Ranks = npt.NDArray[np.intp]

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
        self._ranks = np.array([], dtype=np.intp)
        self._rows: list[FloatArray] = []
        self._blocks: deque[FloatArray] = deque(maxlen=BLOCKS)

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, unless it was skipped or a rank is missing."""
        if not step.skipped and step.coverage == 1.0:
            self.fold(step.compute_seconds)

    def fold(self, compute_seconds: Mapping[int, float]) -> None:
        """Add a step. When ranks come or go, all blocks start over."""
        if len(compute_seconds) < 2:
            return
        found = RankValues.of(compute_seconds)
        if not np.array_equal(found.ranks, self._ranks):
            self._ranks, self._rows = found.ranks, []
            self._blocks.clear()
        self._rows.append(found.array)
        if len(self._rows) >= BLOCK_STEPS:
            self._blocks.append(np.median(np.stack(self._rows), axis=0))
            self._rows = []
            self.worst = slowest(self._ranks, self._blocks)


def slowest(ranks: _Ranks, blocks: Sequence[FloatArray]) -> Straggler | None:
    """Return the slowest rank relative to the (low) median of all; None if the median is 0.

    blocks: seconds per rank [R]. Each rank counts with its fastest block. With two ranks the
    reference is the faster one, not their mean.
    """
    middle = (len(ranks) - 1) // 2
    usual = [float(np.partition(block, middle)[middle]) for block in blocks]
    if min(usual) <= 0.0:
        return None
    slowdowns = np.min([block / u for block, u in zip(blocks, usual, strict=True)], axis=0)
    delays = np.min([block - u for block, u in zip(blocks, usual, strict=True)], axis=0)
    index = int(np.argmax(slowdowns))
    return Straggler(
        rank=int(ranks[index]),
        slowdown=float(slowdowns[index]),
        delay_seconds=float(delays[index]),
    )


_LOSS_STEPS = 64
_LEVEL_LOSSES = 32
_INTERVAL_STEPS = 8
"""Steps between two comparisons."""
_OUTLIERS = 3
_FAR = 4.0
"""Distance of an outlier from the usual loss, in that of the highest loss of all other ranks."""
_ALL_BUT_SOME = 0.75
_UNLIKE = 2.0
"""Factor between the losses of a rank and those of others that chance does not make for long."""
_NOISIER = 1.5
"""Factor between the scatters of ranks from which on their losses are means over unequal counts."""


@dataclass(kw_only=True)
class RankLossTracker(Tracker):
    """Compares the last losses of all ranks. Stored is what was found, and how they scattered.

    A rank that always had fewer tokens than others has noisier losses of the same level: single
    ones are high, and most are low where few tokens make the most of a loss.
    """

    outliers: OddRank | None = None
    """The rank with single losses far above all that the others had."""
    level: OddRank | None = None
    """The rank whose losses are all far from those of the others."""
    scatters: dict[int, float] = field(default_factory=dict)
    """How much the losses of each rank moved from one to the next when the run began."""
    settled: bool = False
    """Whether these are of enough losses, and stay."""

    def __post_init__(self) -> None:
        self._ranks = np.array(list(self.scatters), dtype=np.intp)
        self._rows: deque[FloatArray] = deque(maxlen=_LOSS_STEPS)

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, unless it was skipped or a rank is missing.

        Of ranks that train models of their own, losses that differ say nothing.
        """
        if step.independent:
            self.outliers = self.level = None
            return
        if step.skipped or step.coverage < 1.0 or len(step.losses) < 2:
            return
        if context.progress.misreadings.scaled:
            return
        self.fold(step.losses, step.sequence)

    def fold(self, losses: Mapping[int, float], sequence: int) -> None:
        """Add a step. When ranks come or go, the window starts over."""
        found = RankValues.of(losses)
        ranks = found.ranks
        if not np.array_equal(ranks, self._ranks):
            self._ranks, self.settled = ranks, False
            self._rows.clear()
        self._rows.append(found.array)
        if sequence % _INTERVAL_STEPS or len(self._rows) < _LEVEL_LOSSES:
            return
        window_WR = np.stack(self._rows)
        if not self.settled:
            moves_R = np.median(np.abs(np.diff(window_WR, axis=0)), axis=0)
            self.scatters = dict(zip(ranks.tolist(), moves_R.tolist(), strict=True))
            self.settled = len(window_WR) == _LOSS_STEPS
        scatters_R = np.array(list(self.scatters.values()))
        self.outliers = _outliers(ranks, window_WR, scatters_R)
        self.level = _unlike(ranks, window_WR[-_LEVEL_LOSSES:], scatters_R)


def _outliers(ranks: _Ranks, window_WR: FloatArray, scatters_R: FloatArray) -> OddRank | None:
    """Return the rank with the highest loss if several of its own are beyond all others'.

    In a mean over a seventh of the tokens, each counts seven times as much; and seven times as many
    have rare ones that the fewer do not have.
    """
    highest_R = window_WR.max(axis=0)
    place = int(highest_R.argmax())
    others = float(np.delete(highest_R, place).max())
    own_W = window_WR[:, place]
    # Of more than two ranks the bound is no lower than this, and the median of all takes long.
    if len(ranks) > 2 and (own_W > others).sum() < _OUTLIERS:
        return None
    center = float(np.median(window_WR))
    own, usual = float(scatters_R[place]), float(np.median(np.delete(scatters_R, place)))
    low, high = sorted((own, usual))
    ratio = high / low if high > _NOISIER * low > 0.0 else 1.0
    tokens = ratio * ratio
    bound = max(center + _FAR * tokens * (others - center), _UNLIKE * center)
    count = int((own_W > bound).sum())
    if center <= 0.0 or not _OUTLIERS <= count <= len(own_W) // 2:
        return None
    return OddRank(
        rank=int(ranks[place]),
        steps=count,
        loss=float(highest_R[place]),
        usual=center,
        highest=others,
    )


def _unlike(ranks: _Ranks, window_WR: FloatArray, scatters_R: FloatArray) -> OddRank | None:
    """Return the rank three quarters of whose losses are twice those of all others, or half, or 0.

    Of losses that are negative a factor says nothing, nor where several ranks have some that are 0.
    """
    zeros_R = (window_WR == 0.0).mean(axis=0)
    if window_WR.min() < 0.0 or np.count_nonzero(zeros_R) > 1:
        return None
    if 0.0 < zeros_R.max() < _ALL_BUT_SOME:
        return None
    ordered_WR = np.sort(window_WR, axis=0)
    low_R, middle_R, high_R = (_quantile(ordered_WR, share) for share in (0.25, 0.5, 0.75))
    highest = int(low_R.argmax())
    # Of two ranks with different losses the higher one has the worse data, or labels.
    candidates = [highest] if len(ranks) == 2 else [highest, int(high_R.argmin())]
    candidates = [int(zeros_R.argmax())] if zeros_R.max() else candidates
    for place in candidates:
        lower, higher = np.delete(low_R, place).min(), np.delete(high_R, place).max()
        own, others_R = float(scatters_R[place]), np.delete(scatters_R, place)
        above = low_R[place] > _UNLIKE * higher and others_R.min() <= _NOISIER * own
        below = _UNLIKE * high_R[place] < lower and own <= _NOISIER * others_R.max()
        if above or below:
            return OddRank(
                rank=int(ranks[place]),
                steps=len(window_WR),
                loss=float(middle_R[place]),
                usual=float(np.median(np.delete(middle_R, place))),
                highest=float(higher),
            )
    return None


def _quantile(ordered_WR: FloatArray, share: float) -> FloatArray:
    """Return what `np.quantile` does, which takes several times as long on many columns."""
    place = share * (len(ordered_WR) - 1)
    below = int(place)
    lower_R, upper_R = ordered_WR[below], ordered_WR[below + (place > below)]
    part, step_R = place - below, upper_R - lower_R
    quantile_R: FloatArray
    quantile_R = upper_R - step_R * (1 - part) if part >= 0.5 else lower_R + step_R * part
    return quantile_R
