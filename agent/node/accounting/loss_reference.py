"""The best level of the loss so far, and whether the run has lost what it had learned.

Unlike the rolling median, this reference does not follow a rising loss. It is replaced only when
the loss settles on a new level without any sign of damage, as after a change of data or objective.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

NEAR_STEPS = 512
"""Most losses between a disturbance (an explosion, non-finite gradients, a jump of the
learning rate) and a rise of the loss that it may have caused."""
LONG_RISE_STEPS = 320
"""Losses between the best level and the initial one, at or above which the loss is taken to have
crept up rather than jumped."""
CLIMB_STEPS = 4
"""Losses that the recent median takes at least from a quarter of the way to its goal when the loss
climbs there; a single jump, as to other data or to one more loss term, takes one or two."""
LEVEL_STEPS = 512
"""Losses on its level after which a loss that never fell is not meant to double within as many."""
ACCEPT_STEPS = 2048
"""Losses on a higher level, the last half of them without a rise, after which that level is normal
if nothing indicates damage."""
_FAR_DEVIATIONS = 12.0
_SMOOTH_DEVIATIONS = 6.0
_LEARNED_SHARE = 0.25
"""Share of the best loss by which the loss must have fallen to count as learning."""
_DAMAGED_SHARE = 0.5
_UNLEARNED_SHARE = 0.9
_NOTICEABLE_SHARE = 0.1
_RECOVERED_SHARE = 0.5
_SETTING_OUT_SHARE = 0.25
_LEAP_SHARE = 0.5
"""Share of the way to a multiple of the best level from which one move is a jump, no climb."""
_HELD_SHARE = 0.9
"""Share of the highest rise at which the loss still is unless it recovers."""
_JUMP_SHARE = 0.25
"""Share of the far distance: a median of many losses that moves by more in one step does not
creep."""
LATEST_STEPS = 8
"""Losses whose median shows within some steps that the loss has doubled."""
_AT_ONCE_SHARE = 0.375
"""Share of the losses after which a run is lost that are enough where it doubled and does not come
back: 24, so that a spike of about twenty losses is none."""
_AT_TOP_SHARE = 0.95
"""Share of the highest rise at which a loss still is that has not begun to fall."""
_FALL_SHARE = 0.01
"""Share of its rise by which a loss that comes back falls at least within `LATEST_STEPS`."""


@dataclass(slots=True, kw_only=True)
class Doubling:
    """Tracks the median of a few losses on its way to a multiple of its best level. Plain data.

    It decides within some steps where there is no doubt: the loss had fallen far, it climbed there
    or was damaged, by far more than it scatters, and it is still about as high as it ever was.
    """

    start: float | None = None
    best: float | None = None
    scatter: float = 0.0
    """Breadth of the losses around their trend at the best level."""
    last: float = 0.0
    """The previous level."""
    climb_steps: int = 0
    """Losses that it took from a quarter of the way to the multiple."""
    leapt: bool = False
    """Whether it jumped on the way, as to other data."""
    grown_steps: int = 0
    """Consecutive losses above the multiple."""
    highest: float = 0.0
    """The highest level since it set out."""
    lost: bool = False

    def fold(
        self,
        latest: float,
        move: float,
        scatter: Callable[[], float],
        thresholds: Mapping[str, float],
        unharmed_steps: int | None,
    ) -> None:
        """Add the median of the last few losses, and what it rose by since the few before.

        scatter: returns theirs, asked at a best level. unharmed_steps: since severe damage.
        """
        step, self.last = latest - self.last, latest
        if self.start is None or self.best is None or (not self.grown_steps and latest < self.best):
            self.start = latest if self.start is None else self.start
            self.best, self.scatter = latest, scatter()
            self.lost = False
            return
        learned, growth = self.start - self.best, thresholds["loss_growth"] - 1.0
        if self.best <= 0.0 or learned <= _LEARNED_SHARE * self.best:
            return
        far = _FAR_DEVIATIONS * max(self.scatter, thresholds["loss_deviation_floor"] * self.best)
        way = max(far, growth * self.best, _NOTICEABLE_SHARE * learned)
        rise = latest - self.best
        self._climb(latest, step, rise, way)
        self.lost &= rise > _RECOVERED_SHARE * way
        if self.grown_steps >= _AT_ONCE_SHARE * thresholds["loss_lost_steps"]:
            set_out_steps = self.climb_steps + self.grown_steps
            near = unharmed_steps is not None and unharmed_steps <= set_out_steps + LATEST_STEPS
            climbed = self.climb_steps >= CLIMB_STEPS and not self.leapt
            at_top = rise >= _AT_TOP_SHARE * (self.highest - self.best)
            self.lost |= (climbed or near) and at_top and move >= -_FALL_SHARE * rise

    def _climb(self, latest: float, step: float, rise: float, way: float) -> None:
        """Follow the level on its way. step: what it rose by since the last one."""
        if rise <= _SETTING_OUT_SHARE * way:
            self.climb_steps = self.grown_steps = 0
            self.leapt, self.highest = False, latest
            return
        self.highest = max(self.highest, latest)
        if not self.grown_steps:
            self.climb_steps += 1
            # The median of an even number of losses takes a jump in two steps.
            self.leapt |= step > _LEAP_SHARE / 2 * way
        # Once there it stays for as long as it scatters about the multiple.
        stays = rise > (_HELD_SHARE * way if self.grown_steps else way)
        self.grown_steps = self.grown_steps + 1 if stays else 0


@dataclass(slots=True, kw_only=True)
class LossReference:
    """Tracks the median of the last losses, step by step. Plain data, stored in the ledger."""

    start: float | None = None
    """The highest level before the best one."""
    best: float | None = None
    deviation: float = 0.0
    """Deviation of the losses around the best level."""
    high_steps: int = 0
    """Consecutive losses with a recent median above the bound for damage."""
    left_steps: int = 0
    """Consecutive losses with a recent median clearly above the best level."""
    unlearned_steps: int = 0
    """Consecutive losses with a recent median near the initial level, or above."""
    risen_steps: int = 0
    """Losses since the loss rose far above the best level without recovering."""
    top: float = 0.0
    """The recent median at the last far rise since the loss rose above the bound."""
    top_steps: int = 0
    """Losses since that rise."""
    highest: float = 0.0
    """The highest recent median since the loss rose."""
    damaged: bool = False
    """Whether a disturbance came with the rise."""
    undisturbed_steps: int | None = None
    """Losses since the last disturbance; None without any."""
    unharmed_steps: int | None = None
    """Losses since the last severe disturbance; None without any."""
    last: float | None = None
    """The previous recent median of the loss."""
    level_steps: int = 0
    """Losses before the loss set out for a multiple of its best level."""
    climb_steps: int = 0
    """Consecutive losses since the loss set out."""
    grown_steps: int = 0
    """Consecutive losses with a recent median above that multiple."""
    climbed: bool = False
    """Whether it got there by climbing rather than by a jump."""
    other_models: bool = False
    """Whether other models are trained in turn, against which the loss may rise by design."""
    restart_steps: int | None = None
    """Losses since the learning rate schedule restarted; None without a restart."""
    lost_steps: int = 0
    """Losses since the run has lost what it had learned; 0 while it has not."""
    doubling: Doubling = field(default_factory=Doubling)

    def disturb(self, *, severe: bool) -> None:
        """Note a disturbance that may set the run back.

        severe: regardless of the run's own norms; a loss that never fell needs a severe one.
        """
        self.undisturbed_steps = 0
        if severe:
            self.unharmed_steps = 0

    def restart_schedule(self) -> None:
        """Note a restart of the learning rate schedule, which sets the loss back for a while."""
        self.restart_steps = 0

    def fold_latest(
        self,
        latest: float,
        move: float,
        scatter: Callable[[], float],
        thresholds: Mapping[str, float],
    ) -> None:
        """Add the median of the last few losses, before that of more of them; as `Doubling`."""
        restarted = self.restart_steps is not None and self.restart_steps <= NEAR_STEPS
        if restarted or self.other_models:
            self.doubling = Doubling()
        else:
            self.doubling.fold(latest, move, scatter, thresholds, self.unharmed_steps)

    def fold(
        self,
        recent: float,
        deviation: Callable[[], float],
        steady: Callable[[], bool],
        thresholds: Mapping[str, float],
    ) -> None:
        """Add the median of the last losses. deviation: returns theirs, asked at a best level.

        steady: returns whether they scatter little for their level, asked of one that has risen.
        """
        if self.undisturbed_steps is not None:
            self.undisturbed_steps += 1
        if self.unharmed_steps is not None:
            self.unharmed_steps += 1
        if self.restart_steps is not None:
            self.restart_steps += 1
        if self.best is None or self.start is None:
            self.start = self.best = recent
            self.deviation = deviation()
            return
        if not self.risen_steps:
            self._improve(recent, deviation)
        self._rise(recent, steady, thresholds)

    def _improve(self, recent: float, deviation: Callable[[], float]) -> None:
        assert self.best is not None and self.start is not None
        if recent < self.best:
            self.best, self.deviation = recent, deviation()

    def _rise(
        self, recent: float, steady: Callable[[], bool], thresholds: Mapping[str, float]
    ) -> None:
        assert self.best is not None
        far = _FAR_DEVIATIONS * self._scale(thresholds)
        multiple = thresholds["loss_growth"] * self.best
        high, unlearned = self._bounds(far, multiple)
        self.left_steps = self.left_steps + 1 if recent > self.best + far else 0
        move = 0.0 if self.last is None else recent - self.last
        if move > _JUMP_SHARE * far:
            # A further jump from a higher level, as in a curriculum, is not creeping either.
            self.left_steps = 0
        self.last = recent
        self.high_steps = self.high_steps + 1 if recent > high else 0
        self._climb(recent, move, far, multiple)
        # A loss that creeps up by less than that may do so by design, as in adversarial training.
        unlearning = unlearned is not None and recent > max(unlearned, multiple)
        unlearning &= not self.other_models
        self.unlearned_steps = self.unlearned_steps + 1 if unlearning else 0
        doubled = self.doubling.lost
        back = recent <= self.best + _RECOVERED_SHARE * (high - self.best)
        if self.risen_steps and back and not doubled:
            self._recovered()
        elif self.risen_steps or self.high_steps or doubled:
            since = self.unharmed_steps if unlearned is None else self.undisturbed_steps
            self.damaged |= since is not None and since <= NEAR_STEPS + self.risen_steps
            self._note_top(recent, far)
            self._count(recent, steady, thresholds["loss_lost_steps"])
        settled = self.risen_steps >= ACCEPT_STEPS and self.top_steps >= ACCEPT_STEPS // 2
        if settled and not self.lost_steps:
            self._recovered()
            self.start = self.best = recent
            self.doubling = Doubling()

    def _climb(self, recent: float, move: float, far: float, multiple: float) -> None:
        """Follow the loss on its way to a multiple of its best level, where that has a meaning.

        move: what the recent median rose by.
        """
        assert self.best is not None and self.start is not None
        if self.best <= 0.0 or self.other_models:
            return
        learned = self.start - self.best
        way = max(far, multiple - self.best, _NOTICEABLE_SHARE * learned)
        if recent <= self.best + _SETTING_OUT_SHARE * way:
            self.level_steps += self.climb_steps + 1
            self.climb_steps = self.grown_steps = 0
            self.climbed = False
            return
        self.climb_steps = 0 if move > _LEAP_SHARE * way else self.climb_steps + 1
        if recent <= self.best + way:
            self.grown_steps = 0
            return
        if not self.grown_steps:
            self.climbed = self._has_climbed(far)
        self.grown_steps += 1

    def _has_climbed(self, far: float) -> bool:
        """Return whether a loss that has just reached the multiple got there by divergence.

        Not by a jump. One that never fell was long on its level before and rose quickly: some
        losses are meant to rise.
        """
        quickly = self.level_steps >= LEVEL_STEPS >= self.climb_steps
        return self.climb_steps >= CLIMB_STEPS and (quickly or self._has_learned(far))

    def _stays_grown(self, recent: float, steps_needed: float) -> bool:
        """Return whether a loss that climbed to the multiple does not come back from there.

        After a restart of the schedule it has longer to, and may take its time.
        """
        assert self.best is not None
        if not self.climbed or self.grown_steps < steps_needed:
            return False
        held = recent >= self.best + _HELD_SHARE * (self.highest - self.best)
        if self.restart_steps is not None and self.restart_steps - self.grown_steps <= NEAR_STEPS:
            return held and self.restart_steps > NEAR_STEPS
        return held or self.grown_steps >= NEAR_STEPS

    def _count(self, recent: float, steady: Callable[[], bool], steps_needed: float) -> None:
        self.risen_steps += 1
        slowly = self.left_steps - self.unlearned_steps >= LONG_RISE_STEPS
        crept = slowly and self.unlearned_steps >= steps_needed
        harmed = self.damaged and self.high_steps >= steps_needed
        harmed = harmed and self._stays_high(recent, steady)
        grown = self.doubling.lost or self._stays_grown(recent, 2 * steps_needed)
        if self.lost_steps or harmed or ((crept or grown) and steady()):
            self.lost_steps += 1

    def _stays_high(self, recent: float, steady: Callable[[], bool]) -> bool:
        """Return whether a loss that rose at a disturbance does not come back from there.

        Another task makes the norm jump with the loss, and is then learned like the one before.
        """
        assert self.best is not None
        severe = self.unharmed_steps is not None
        severe = severe and (self.unharmed_steps or 0) <= NEAR_STEPS + self.risen_steps
        held = recent >= self.best + _HELD_SHARE * (self.highest - self.best)
        return severe or ((held or self.high_steps >= NEAR_STEPS) and steady())

    def _note_top(self, recent: float, far: float) -> None:
        self.top_steps += 1
        if self.risen_steps == 0 or recent > self.top + far:
            self.top, self.top_steps = recent, 0
        self.highest = max(self.highest, recent) if self.risen_steps else recent

    def _recovered(self) -> None:
        self.high_steps = self.unlearned_steps = self.risen_steps = self.lost_steps = 0
        self.left_steps = self.level_steps = self.climb_steps = self.grown_steps = 0
        self.damaged = self.climbed = False

    def _has_learned(self, far: float) -> bool:
        """Return whether the loss fell far from where it began."""
        assert self.best is not None and self.start is not None
        smooth = _SMOOTH_DEVIATIONS / _FAR_DEVIATIONS * far
        return self.start - self.best > max(smooth, _LEARNED_SHARE * abs(self.best))

    def _scale(self, thresholds: Mapping[str, float]) -> float:
        assert self.best is not None
        return max(self.deviation, thresholds["loss_deviation_floor"] * abs(self.best))

    def _bounds(self, far: float, multiple: float) -> tuple[float, float | None]:
        """Return the level that indicates damage, and the one at which everything learned is lost.

        The second is None for a loss that never fell far: for a loss around zero, or one that is
        meant to rise, no level means that something was lost.
        """
        assert self.best is not None and self.start is not None
        learned = self.start - self.best
        # Of noisy losses a multiple of the best level is far enough.
        harmful = far if self.best <= 0.0 else min(far, max(far / 2, multiple - self.best))
        if not self._has_learned(far):
            return self.best + max(harmful, _DAMAGED_SHARE * abs(self.best)), None
        share = max(_DAMAGED_SHARE * min(learned, abs(self.best)), _NOTICEABLE_SHARE * learned)
        return self.best + max(harmful, share), self.best + max(far, _UNLEARNED_SHARE * learned)
