"""Compares the loss with the run's own history: usual level, scatter, spikes, trend."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise, takewhile
from math import sqrt
from typing import Annotated

from pydantic import Field

from mp_agent.node.accounting.learning import RESTART_STEPS
from mp_agent.node.accounting.loss_reference import LATEST_STEPS, LossReference
from mp_agent.node.accounting.tracker import AccountContext, ModelTracker
from mp_agent.node.accounting.windows import (
    LARGEST,
    breadth_of_sorted,
    deviation,
    deviation_of_sorted,
    mean,
    median,
    median_of_sorted,
    scatter_around_trend,
    standard_deviation,
)
from mp_agent.records.health import LossHistory
from mp_agent.records.merged import MergedStep

WINDOW_STEPS = 256
"""Number of losses whose median is the usual level."""
_JUDGED_STEPS = 3
_FALLING_STEPS = 32
"""Losses whose highest one bounds the next, where they fall."""
_FALL_SHARE = 0.1
"""Rise, in shares of the fall before, that is too little for a spike."""
_HIGH_SHARE = 0.97
_EARLY_RISE = 2.0
"""Rise above the highest of the first losses, in medians of them, from which a loss is unusual."""
_RUNAWAY_FACTOR = 1.5
"""Growth from one loss to the next, both above the spike bound, that no other data explain."""
WARM_UP_STEPS = 64
"""Number of losses below which there is no usual level."""
EARLY_STEPS = 5
"""Number of losses from which on a loss far above all of them is noticed, and the best level is
known: damage may come before there is a usual level, which must not begin inside it."""
BLOCK_STEPS = 16
"""Losses per block; the trend keeps only their median."""
RECENT_STEPS = 64
"""Losses whose median is compared with the best level."""
NOISY_SHARE = 0.01
"""Share of losses above the bound from which on the losses count as noisy."""
_ALONE_AT_LEAST, _ALONE_AT_MOST = 3, 12
"""Single losses, of the last `_ALONE_STEPS`, that are neither chance nor usual."""
_ALONE_STEPS = 64
_PAST_STEPS = 32
"""Losses at least, before these, that had none of the kind."""
_ALONE_FACTOR = 4.0
"""Distance of such a loss from the usual one, in that of the highest loss before."""
_STEADY_SHARE = 0.1
"""Median move of a loss, in shares of its level, from which on a rise says nothing by itself."""
_FIRST_PAIRS = 64
_PAIRS_AT_LEAST = 12
_MULTIPLES_SHARE = 0.25
"""Share of the first losses that are twice the one before or half of it, as many of each, from
which on the loss has no level: at most an eighth are with labelled data, two fifths or more where a
loss is a sum over an episode. One that multiplies only when it has become small had a level."""
TREND_BLOCKS = 32
"""Blocks in each of the two windows that the trend compares: 512 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLevel:
    """The usual loss. `deviation` is the median absolute one; a loss above the bound is unusual."""

    median: float
    deviation: float
    spike_bound: float
    noisy: bool = False
    """Whether losses far above the usual one are frequent."""


@dataclass(slots=True, kw_only=True)
class LossTracker(ModelTracker):
    """Tracks the merged loss of a run. Bounded plain data, stored in the ledger.

    Only these losses count: finite on all ranks that delivered, of steps that were not skipped,
    over about as many ranks as the losses before. A single loss above the spike bound is an odd
    batch; two of the last three are a spike. Noisy losses need three in a row and a higher bound.
    Single ones that come again and again are spikes from the third on, if there were none before.
    """

    window: list[float] = field(default_factory=list)
    ordered: Annotated[list[float], Field(exclude=True)] = field(
        default_factory=list, repr=False, compare=False
    )
    """The same, ascending; not stored."""
    recent: Annotated[list[float], Field(exclude=True)] = field(
        default_factory=list, repr=False, compare=False
    )
    """The last `RECENT_STEPS` of them, ascending; not stored."""
    above: list[bool] = field(default_factory=list)
    """Whether each of the last losses was above the bound at that time."""
    block: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    """Medians of the last blocks, oldest first."""
    trend_deviations: float | None = None
    """The trend of these medians."""
    spiking: bool = False
    """Whether the last step belongs to a spike."""
    explained: bool = False
    """Whether the learning rate schedule restarted shortly before the last step."""
    restart_bound: float | None = None
    """Level below which the loss has to be once the restart explains nothing any more."""
    overdue_steps: int = 0
    """Consecutive losses since then with a recent median above it."""
    rising: bool = False
    """Whether the trend was above its limit after the last complete block."""
    rising_steps: int = 0
    """Consecutive losses for which the trend was above its limit."""
    reference: LossReference = field(default_factory=LossReference)
    pairs: int = 0
    """Pairs of consecutive losses among the first ones."""
    leaps: int = 0
    """Those of them whose second loss is more than twice the first, or no longer negative."""
    drops: int = 0
    """Those whose second loss is less than half of the first, or negative by now."""
    ranks: int = 0
    """Number of ranks over which the last loss that counted is the mean."""
    fewer_steps: int = 0
    """Consecutive losses over less than half as many ranks."""

    def __post_init__(self) -> None:
        self.ordered = sorted(self.window)
        self.recent = sorted(self.window[-RECENT_STEPS:])

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, with the disturbances that may set the loss back.

        A loss that is multiplied by a scale, which moves, is not compared; of one that has no level
        nothing follows from a rise.
        """
        if context.progress.misreadings.scaled:
            self.spiking, self.reference = False, LossReference()
            return
        norms, learning = context.progress.norms, context.progress.learning
        largest = max(norms.exploded.values(), default=0.0)
        unskipped_nonfinite = step.gradient_nonfinite_elements > 0 and not step.weights_kept
        high = largest > context.thresholds["grad_norm_high"]
        severe = unskipped_nonfinite or learning.rate_jumped or high
        if severe or largest or learning.rate_raised:
            self.reference.disturb(severe=severe)
        self.reference.other_models |= any(not own.joint for own in step.optimizers.values())
        self.fold(step, context.thresholds)
        if self.multiplies:
            self.spiking, self.reference = False, LossReference()
        broken = step.flag("loss_nonfinite") and not step.weights_kept
        if learning.confirm(trouble=broken or self.spiking or bool(norms.exploded)):
            self.reference.disturb(severe=True)
        self._fold_restart(learning.restarted_steps, context.thresholds)
        self.explained = learning.restarted

    @property
    def multiplies(self) -> bool:
        """Whether the loss has multiplied from step to step since the run began.

        Its level says how long episodes are, or what was drawn, and not what the model has learned.
        One that leaps up alone is lost from the start, and one that drops alone learns fast.
        """
        both = 2 * min(self.leaps, self.drops)
        return both > _MULTIPLES_SHARE * max(self.pairs, _PAIRS_AT_LEAST)

    @property
    def unexplained(self) -> bool:
        """Whether the last step belongs to a spike that nothing explains (any more)."""
        overdue = 0 < self.overdue_steps <= WINDOW_STEPS
        return not self.explained and (self.spiking or overdue)

    def view(self, context: AccountContext) -> LossHistory:
        """Return the usual loss, its trend, and the best level; nothing of a misread loss."""
        if context.progress.misreadings.scaled:
            return LossHistory()
        best, level = self.reference.best, self.level(context.thresholds)
        usual = LossHistory(
            median=None if level is None else level.median,
            deviation=None if level is None else level.deviation,
            fall=self._fall(),
        )
        if self.multiplies:
            return usual
        return replace(
            usual,
            spike_bound=None if level is None else level.spike_bound,
            trend=self.trend_deviations,
            rising_steps=self.rising_steps,
            best=best,
            solved=self._is_solved(context.thresholds),
            lost_steps=None if best is None else self.reference.lost_steps,
        )

    def fold(self, step: MergedStep, thresholds: Mapping[str, float]) -> None:
        """Add a closed step; it is judged by the window before it."""
        loss = step.get("loss")
        self.spiking = False
        if loss is None or step.skipped or step.flag("loss_nonfinite"):
            return
        if not self._has_usual_ranks(len(step.present_ranks)):
            return
        if self.window and self.pairs < _FIRST_PAIRS:
            self._count_pair(self.window[-1], loss)
        usual = self._usual(thresholds)
        self._judge(loss, self._level_before(loss, usual, thresholds), thresholds)
        self._fold_window(loss)
        self._fold_block(loss)
        if not self.block:
            trend = self.trend_deviations = self.trend(thresholds)
            risen = trend is not None and trend > thresholds["loss_trend_deviations"]
            self.rising = risen and self._is_steady()
        self.rising_steps = self.rising_steps + 1 if self.rising else 0
        if usual is not None or self._has_scale(EARLY_STEPS, thresholds):
            latest = median(self.window[-LATEST_STEPS:])
            earlier = self.window[-2 * LATEST_STEPS : -LATEST_STEPS]
            move = latest - median(earlier) if earlier else 0.0
            around_trend = partial(scatter_around_trend, self.window, RECENT_STEPS)
            self.reference.fold_latest(latest, move, around_trend, thresholds)
            # A falling loss scatters by its fall too; the fewer losses, the less.
            center = median_of_sorted(self.recent)
            scatter = partial(self._scatter, center)
            self.reference.fold(center, scatter, self._is_steady, thresholds)

    def _count_pair(self, before: float, loss: float) -> None:
        self.pairs += 1
        half = max(abs(loss), abs(before)) / 2
        self.leaps += loss - before > half
        self.drops += before - loss > half

    def next_bound(self, thresholds: Mapping[str, float]) -> float | None:
        """Return the bound above which the next loss is unusual; None while there is none."""
        level = self._level_before(LARGEST, self._usual(thresholds), thresholds)
        return None if level is None else level.spike_bound

    def level(self, thresholds: Mapping[str, float]) -> LossLevel | None:
        """Return the usual level; None during the warm-up, and where there is no scale."""
        usual = self._usual(thresholds)
        return None if usual is None else self._level_around(usual, thresholds)

    def _level_around(self, center: float, thresholds: Mapping[str, float]) -> LossLevel:
        spread = deviation_of_sorted(self.ordered, center)
        used = max(spread, thresholds["loss_deviation_floor"] * abs(center))
        bound = _bound(center, thresholds["loss_spike_deviations"] * used)
        # Without the last losses, which may be the spike itself.
        settled = self.window[:-_JUDGED_STEPS]
        blocks = [settled[at : at + BLOCK_STEPS] for at in range(0, len(settled), BLOCK_STEPS)]
        levels = [median(block) for block in blocks]
        # The first losses are often far above, to amid a block: that is the fall, and no noise.
        fallen = sum(1 for _ in takewhile(lambda level: level > bound, levels))
        since = sorted(settled[(fallen + 1) * BLOCK_STEPS if fallen else 0 :])
        above = len(since) - bisect_right(since, bound)
        noisy = above > NOISY_SHARE * len(since)
        # What is above in the earlier half alone is the fall as well, which one block may hide.
        goes_on = noisy and max(settled[len(settled) // 2 :]) > bound
        falling = None if goes_on else self._bound_of_fall(levels, thresholds)
        if noisy:
            bound = _bound(center, thresholds["loss_spike_noisy_deviations"] * used)
            high = since[int(_HIGH_SHARE * len(since))]
            bound = max(bound, _bound(center, 2 * (high - center)))
        if falling is not None:
            bound = min(bound, max(falling, center))
        elif fallen and not noisy:
            bound = max(bound, _bound(center, _FALL_SHARE * (max(levels) - center)))
        return LossLevel(median=center, deviation=spread, spike_bound=bound, noisy=noisy)

    def _bound_of_fall(
        self, levels: Sequence[float], thresholds: Mapping[str, float]
    ) -> float | None:
        """Return the bound of a loss that falls, whose distances are mostly its fall.

        It lies above the last losses by what these scatter around their trend. levels: of the
        window, block by block. None where the loss does not fall, or rose by half as much before:
        between tasks in turn, say.
        """
        scatter = scatter_around_trend(self.window, _FALLING_STEPS)
        distance = thresholds["loss_spike_noisy_deviations"] * scatter
        latest = self.window[-_FALLING_STEPS - _JUDGED_STEPS : -_JUDGED_STEPS]
        bound = _bound(max(latest), distance)
        lowest = accumulate(levels, min)
        risen = max(level - low for level, low in zip(levels, lowest, strict=True))
        now = median(latest)
        bound = max(bound, _bound(now, _FALL_SHARE * (max(levels) - now)))
        falls = max(levels) > _bound(now, distance) > now
        return bound if falls and bound > now + 2 * risen else None

    def trend(self, thresholds: Mapping[str, float]) -> float | None:
        """Return by how many deviations the loss rose from one long window to the next.

        Based on medians of blocks, so that an outlier, a spike or a slow wave within a window
        weighs little. None until both windows are full.
        """
        if len(self.medians) < 2 * TREND_BLOCKS:
            return None
        before, recent = self.medians[:TREND_BLOCKS], self.medians[TREND_BLOCKS:]
        center = median(before)
        floor = thresholds["loss_deviation_floor"] * abs(center)
        used = max(deviation(before, center), floor)
        rise = min(max(median(recent) - center, -LARGEST), LARGEST)
        if used == 0.0:
            return None if rise else 0.0
        return min(max(rise / used, -LARGEST), LARGEST)

    def _is_solved(self, thresholds: Mapping[str, float]) -> bool:
        """Return whether the loss is next to nothing of what it was."""
        start = self.reference.start
        if not self.recent or start is None or self.recent[0] < 0.0:
            return False
        return median_of_sorted(self.recent) <= thresholds["loss_solved"] * start

    def _fall(self) -> float | None:
        """Return by how many of its standard deviations the later half of the losses is lower."""
        if len(self.window) < WINDOW_STEPS:
            return None
        before, recent = self.window[: WINDOW_STEPS // 2], self.window[WINDOW_STEPS // 2 :]
        fall, scatter = mean(before) - mean(recent), standard_deviation(recent)
        return min(max(fall / scatter, -LARGEST), LARGEST) if scatter > 0.0 else None

    def _has_usual_ranks(self, ranks: int) -> bool:
        """Return whether a mean over this many ranks is comparable with the losses before.

        A few missing ranks do not matter. A mean over far fewer scatters more; that becomes the
        usual scatter if they stay away.
        """
        if 2 * ranks < self.ranks:
            self.fewer_steps += 1
            if self.fewer_steps < WARM_UP_STEPS:
                return False
            self.window, self.ordered, self.recent, self.above = [], [], [], []
        self.fewer_steps, self.ranks = 0, ranks
        return True

    def _usual(self, thresholds: Mapping[str, float]) -> float | None:
        """Return the median; None of too few losses, and where nothing measures distances."""
        known = self._has_scale(WARM_UP_STEPS, thresholds)
        return median_of_sorted(self.ordered) if known else None

    def _has_scale(self, losses: int, thresholds: Mapping[str, float]) -> bool:
        """Return whether there are so many losses, and something that measures distances."""
        if len(self.window) < losses:
            return False
        center = median_of_sorted(self.ordered)
        floor = thresholds["loss_deviation_floor"] * abs(center)
        return floor > 0.0 or deviation_of_sorted(self.ordered, center) > 0.0

    def _is_steady(self) -> bool:
        """Return whether the losses move from one to the next by little of their level.

        What rises with its scatter has another scale, no worse weights: the squared errors of
        values that grow as a policy gets better.
        """
        moves = [abs(after - before) for before, after in pairwise(self.window)]
        return median(moves) / sqrt(2) < _STEADY_SHARE * abs(median_of_sorted(self.recent))

    def _scatter(self, center: float) -> float:
        """Return the breadth of the last losses.

        The first ones fall, which is no scatter, and a few are a poor estimate of it.
        """
        if len(self.window) >= RECENT_STEPS:
            return breadth_of_sorted(self.recent, center)
        moves = sorted(after - before for before, after in pairwise(self.window))
        scatter = breadth_of_sorted(moves, median_of_sorted(moves)) / sqrt(2)
        return min(scatter * sqrt(RECENT_STEPS / len(moves)), LARGEST)

    def _level_before(
        self, loss: float, usual: float | None, thresholds: Mapping[str, float]
    ) -> LossLevel | None:
        """Return the level that a loss is compared with; what is below its median needs none."""
        if usual is not None:
            return self._level_around(usual, thresholds) if loss > usual else None
        settled = sorted(self.window[:-_JUDGED_STEPS])
        if not EARLY_STEPS <= len(settled) < WARM_UP_STEPS or loss <= settled[-1]:
            return None
        center, high = median_of_sorted(settled), settled[-1]
        if high - settled[0] >= abs(center):
            # Losses about 0, which multiply all the time.
            return None
        bound = _bound(high, _EARLY_RISE * abs(center))
        return LossLevel(
            median=center, deviation=deviation_of_sorted(settled, center), spike_bound=bound
        )

    def _judge(self, loss: float, level: LossLevel | None, thresholds: Mapping[str, float]) -> None:
        """Compare a loss with the level before it, None where it is not above that."""
        self.above = [*self.above[-2:], level is not None and loss > level.spike_bound]
        needed = 3 if level is not None and level.noisy else 2
        self.spiking = self.above[-1] and sum(self.above) >= needed
        if level is not None and not self.spiking:
            self.spiking = is_one_of_several(loss, self.window, thresholds["loss_growth"])
        if level is None or not self.spiking or not all(self.above[-2:]):
            return
        # What grows from step to step is no change of the data.
        risen, before = loss - level.median, self.window[-1] - level.median
        multiple = thresholds["loss_growth"] * abs(level.median)
        if risen > _RUNAWAY_FACTOR * before and loss > multiple:
            self.reference.disturb(severe=True)

    def _fold_restart(self, steps: int | None, thresholds: Mapping[str, float]) -> None:
        """Compare the loss with its level before a restart of the schedule, `steps` ago."""
        if steps == 0:
            level = self.level(thresholds)
            self.restart_bound = None if level is None else level.spike_bound
            if level is not None and level.median > 0.0:
                multiple = thresholds["loss_growth"] * level.median
                self.restart_bound = max(level.spike_bound, multiple)
            self.reference.restart_schedule()
        above = self.restart_bound is not None and bool(self.recent) and not self.multiplies
        if above and steps is not None and steps >= RESTART_STEPS:
            above = median_of_sorted(self.recent) > (self.restart_bound or 0.0)
            self.overdue_steps = self.overdue_steps + 1 if above else 0
            self.restart_bound = self.restart_bound if above else None
        else:
            self.overdue_steps = 0

    def _fold_window(self, loss: float) -> None:
        _slide(self.ordered, self.window, WINDOW_STEPS, loss)
        _slide(self.recent, self.window, RECENT_STEPS, loss)
        self.window = [*self.window[1 - WINDOW_STEPS :], loss]

    def _fold_block(self, loss: float) -> None:
        self.block = [*self.block, loss]
        if len(self.block) >= BLOCK_STEPS:
            self.medians = [*self.medians[1 - 2 * TREND_BLOCKS :], median(self.block)]
            self.block = []


def is_one_of_several(loss: float, window: Sequence[float], growth: float) -> bool:
    """Return whether a loss is far above all that the run had until lately, as some others are.

    window: the losses before it. What scatters more widely all the time is usual, and a loss that
    may be 0 or negative has no multiple.
    """
    recent = [*window[max(len(window) + 1 - _ALONE_STEPS, _PAST_STEPS) :], loss]
    past = window[: len(window) + 1 - len(recent)][-_ALONE_STEPS:]
    if len(past) < _PAST_STEPS or min(*recent, *past) <= 0.0:
        return False
    center, highest = median([*past, *recent]), max(past)
    bound = max(center + _ALONE_FACTOR * (highest - center), growth * center)
    alone = sum(each > bound for each in recent)
    return loss > bound and _ALONE_AT_LEAST <= alone <= _ALONE_AT_MOST


def _slide(ordered: list[float], window: Sequence[float], size: int, newest: float) -> None:
    """Keep the last `size` values of a window ascending, while `newest` is added to it."""
    if len(window) >= size:
        del ordered[bisect_left(ordered, window[-size])]
    insort(ordered, newest)


def _bound(center: float, distance: float) -> float:
    return min(center + min(distance, LARGEST), LARGEST)
