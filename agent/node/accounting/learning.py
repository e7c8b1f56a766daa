"""Detects steps that cannot have trained, learning rate jumps, clipping of scaled gradients.

And mistakes in the order of a loop's calls, of which the probe says on which step it saw them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt

from mp_agent.node.accounting.loss_reference import LossReference
from mp_agent.node.accounting.loss_scale import UNTOUCHED
from mp_agent.node.accounting.tracker import AccountContext, ModelTracker, Tracker
from mp_agent.node.accounting.windows import median
from mp_agent.records.columns import (
    ACCUMULATION_BYPASSED,
    AUTOCAST_FP32_SHARE,
    BACKWARDS_DISCARDED,
    BATCH_NORM_MOMENTUM,
    BETAS_SWAPPED,
    CLIPPED_APART,
    CLIPPED_BY_SHARD,
    CLIPS_NOTHING,
    EPOCH_REPEATED,
    EVALUATED_IN_TRAINING,
    FP16_WITHOUT_LOSS_SCALE,
    GRADIENT_FACTOR,
    GRADIENTS_ADD_UP,
    LATE_CLIPPING,
    LEARNING_RATES_ZERO,
    LEFT_IN_EVALUATION,
    LOSS_IN_16_BITS,
    LOSS_INPUT_MISMATCH,
    OPTIMIZER_NEVER_STEPS,
    PADDING_IN_TARGETS,
    SEED_REPEATED,
    STEP_REPEATED,
    STEP_SCALED,
    TARGETS_BROADCAST,
    TARGETS_MISALIGNED,
    TARGETS_SEEN,
)
from mp_agent.records.health import Learning, LoopMistakes
from mp_agent.records.merged import MergedStep

ZERO_LOSS = "loss 0 with non-finite gradients"
ZERO_GRADIENTS = "all gradients 0"
NO_GRADIENTS = "no gradients"
ZERO_RATE = "learning rate 0"
ALL_RATES_ZERO = "all learning rates 0"
CONSTANT_LOSS = "constant loss"
CONSTANT_NORM = "constant loss and gradient norm"
LOSS_VANISHED = "loss 0"
LOSS_CUT = "loss 0 at once"
CLIPPED_AWAY = "gradients clipped to almost 0"
_DISPROVED_BY_FALL = frozenset((ZERO_RATE, NO_GRADIENTS, ZERO_GRADIENTS, CLIPPED_AWAY))
"""Reasons that a loss which falls all the same disproves: a rate of the first parameter group,
gradients that hooks do not see, norms of 0 in a log whose writer did not see them, and gradients
that an optimizer divides by their size."""
_LIMIT_ALMOST_0 = 1e-6
"""A norm of all gradients that moves no weights: Adam's epsilon alone is 1e-8, for each element."""
_FAR_ABOVE_LIMIT = 1e3
_LATEST_LOSSES = 16
"""Losses whose median is where the best level, which is over more, falls to by itself."""
_FALL_DEVIATIONS = 2.0
"""Fall of the best level, in its deviations, that shows that something is learned."""
_SAME_LOSS_SHARE = 1e-4
"""Share of the loss by which its rounding varies, or that of a model that always answers alike."""
_CLEAR_LOSSES = 16
"""First losses above 0 after which a loss of 0 is not one that began there, as in GRPO."""
_NEAR_ZERO = 0.1
"""Share of its first and of its usual level that a loss passes on its way to 0 if it is learned."""
_SAME_MULTIPLE = 1e-6

WARM_UP_STEPS = 100
"""Steps during which the learning rate may rise freely, unless it rises step by step."""
_GRADUAL_RISES = 16
"""Steps with a new highest rate, from which on a warm-up is known to rise step by step."""
_PLATEAU_STEPS = 1000
"""Steps during which the first change of the rate may end a warm-up at a constant rate."""
_SUSPECT_STEPS = 64
"""Steps after such a change within which trouble proves a jump."""
_RESTART_FACTOR = 5.0
RESTART_STEPS = 256
"""Steps during which a restart of the schedule explains a higher loss."""
_RESTARTS_APART = 2 * RESTART_STEPS
_SAME_NORM = 1.25
"""Factor within which the norm seen by clipping equals the scaled norm that the probe measured."""
_SCALE_MIN = 4.0
"""Smallest loss scale at which a scaled norm differs clearly from an unscaled one."""


@dataclass(slots=True, kw_only=True)
class LearningTracker(ModelTracker):
    """Tracks a run step by step. Plain data, stored in the ledger."""

    untrained: dict[str, int] = field(default_factory=dict)
    """Consecutive steps by reason."""
    nonfinite_steps: int = 0
    """Consecutive steps with non-finite gradients not explained by loss scale calibration."""
    scaled_clip_steps: int = 0
    """Consecutive steps whose clipping saw gradients still multiplied by the loss scale."""
    rates: int = 0
    highest_rate: float = 0.0
    rises: int = 0
    """Steps whose rate was above all previous ones, up to `_GRADUAL_RISES`."""
    rate_jumped: bool = False
    """Whether the last step's learning rate was far above all previous ones, or proved a jump."""
    rate_jump_step: int | None = None
    """The trainer's step of the last rate far above all previous ones, whether a jump or not."""
    rate_raised: bool = False
    """Whether the last step's learning rate was clearly above all previous ones: too little for a
    jump by itself, but a reason for the loss to rise."""
    last_rate: float | None = None
    restarted_steps: int | None = None
    """Steps since the rate returned to an earlier value, as schedules with restarts do."""
    rate_changed: bool = False
    suspect_steps: int | None = None
    """Steps since the end of a possible warm-up at a constant rate."""
    constant_loss: float | None = None
    """The loss that the last ones are equal to."""
    last_norm: float | None = None
    clear_losses: int = 0
    """First losses above 0, up to `_CLEAR_LOSSES`."""
    clear: bool = True
    """Whether all of these were."""
    first_level: float = 0.0
    """Their median."""
    latest_above: list[float] = field(default_factory=list)
    """The latest losses above 0, at most `_CLEAR_LOSSES`."""
    was_zero: bool = False
    """Whether a loss was 0 after these."""
    left_zero: bool = False
    """Whether one above 0 came after a loss of 0 that did, which NaN does not."""
    doubted_level: float | None = None
    """Best level of the loss when a reason was found that its fall would disprove."""
    learns: bool = False
    """Whether the best level has fallen clearly since then."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        self.fold(step, context.thresholds)
        losses = context.progress.losses
        self._follow_level(losses.reference, losses.window[-_LATEST_LOSSES:])

    def view(self) -> Learning:
        """Return for how many steps in a row nothing can have been learned."""
        untrained = {
            reason: steps
            for reason, steps in self.untrained.items()
            if not (self.learns and reason in _DISPROVED_BY_FALL)
        }
        if untrained.get(CONSTANT_NORM) == untrained.get(CONSTANT_LOSS):
            untrained.pop(CONSTANT_LOSS, None)
        return Learning(untrained=untrained, scaled_clip_steps=self.scaled_clip_steps)

    def fold(self, step: MergedStep, thresholds: Mapping[str, float]) -> None:
        """Account for a closed step."""
        self._fold_rate(step.get("learning_rate"), thresholds["learning_rate_jump"])
        if self.rate_jumped or self.suspect_steps == 0:
            self.rate_jump_step = step.step
        self._fold_nonfinite(step, thresholds)
        self._fold_clipping(step)
        if not step.skipped or step.loss_scale is None:
            found = set(self._reasons(step))
            self.untrained = {reason: self.untrained.get(reason, 0) + 1 for reason in found}
            self._note_values(step)

    def _reasons(self, step: MergedStep) -> Iterator[str]:
        loss, nonfinite = step.get("loss"), step.gradient_nonfinite_elements > 0
        without = step.get("sum_squares") is None or step.get("elements") == 0.0
        if loss == 0.0 and nonfinite:
            yield ZERO_LOSS
        elif not nonfinite and without and step.gradients_observed:
            # A step that was not looked at says nothing new; missing ranks may hold the gradients.
            looked = step.get("gradients_measured") != 0.0 or NO_GRADIENTS in self.untrained
            if looked and step.coverage == 1.0:
                yield NO_GRADIENTS
        elif step.get("sum_squares") == 0.0 and not nonfinite and step.gradients_complete:
            yield ZERO_GRADIENTS
        elif loss == 0.0 and self.clear and self.clear_losses >= _CLEAR_LOSSES:
            # Gradients that are seen show by themselves what became of the weights.
            yield LOSS_CUT if self._cut() and not step.gradients_observed else LOSS_VANISHED
        if _is_clipped_away(step.get("clip_max_norm"), step.get("clip_norm")):
            yield CLIPPED_AWAY
        if step.get("learning_rate") == 0.0:
            # Only ranks whose first rate is 0 look at the others.
            yield ALL_RATES_ZERO if step.flag(LEARNING_RATES_ZERO) else ZERO_RATE
        if self._same_loss(loss):
            yield CONSTANT_LOSS
            norm = step.grad_norm
            if norm and norm == self.last_norm and step.gradients_judged:
                yield CONSTANT_NORM

    def _cut(self) -> bool:
        """Return whether the loss was not near 0 before it was 0: trainers log NaN as 0.

        Nor rounded to multiples of its lowest, which then may be the least before 0.
        """
        level, lowest = max(self.first_level, median(self.latest_above)), min(self.latest_above)
        multiples = [each / lowest for each in self.latest_above]
        rounded = all(isfinite(n) and abs(n - round(n)) < _SAME_MULTIPLE for n in multiples)
        return not self.left_zero and not rounded and lowest >= _NEAR_ZERO * level

    def _same_loss(self, loss: float | None) -> bool:
        """Return whether a loss is the one before, but for the rounding; 0 is another matter."""
        constant = self.constant_loss
        if not loss or not constant:
            return False
        return abs(loss - constant) <= _SAME_LOSS_SHARE * abs(constant)

    def _note_values(self, step: MergedStep) -> None:
        loss = step.get("loss")
        if not self._same_loss(loss):
            self.constant_loss = loss
        self.last_norm = step.grad_norm if step.gradients_judged else None
        if loss is not None and loss > 0.0:
            self.latest_above = [*self.latest_above[1 - _CLEAR_LOSSES :], loss]
            self.left_zero |= self.was_zero
        self.was_zero |= loss == 0.0 and self.clear and self.clear_losses >= _CLEAR_LOSSES
        if loss is not None and self.clear and self.clear_losses < _CLEAR_LOSSES:
            self.clear = loss > 0.0
            self.clear_losses += 1
            self.first_level = median(self.latest_above) if self.clear else 0.0

    def _follow_level(self, reference: LossReference, latest: Sequence[float]) -> None:
        """Note whether the best level of the loss has fallen since there is reason to doubt it.

        That level lags: it falls to that of the latest losses without anything being learned.
        """
        best = reference.best
        if best is None or _DISPROVED_BY_FALL.isdisjoint(self.untrained):
            self.doubted_level, self.learns = None, False
        elif self.doubted_level is None:
            self.doubted_level = min([best, *([median(latest)] if latest else ())])
        else:
            fallen = self.doubted_level - best
            # A loss of exactly 0 is not learned: trainers log it in place of NaN.
            self.learns |= best != 0.0 and fallen > _FALL_DEVIATIONS * reference.deviation

    def _fold_nonfinite(self, step: MergedStep, thresholds: Mapping[str, float]) -> None:
        scale = step.loss_scale
        searching = scale is not None and scale > thresholds["loss_scale_floor"]
        if step.gradient_nonfinite_elements > 0 and not searching:
            self.nonfinite_steps += 1
        else:
            self.nonfinite_steps = 0

    def _fold_clipping(self, step: MergedStep) -> None:
        seen, scale, norm = step.get("clip_norm"), step.loss_scale, step.grad_norm
        if step.skipped or seen is None or not norm or not step.gradients_judged:
            return
        if scale is None or scale < _SCALE_MIN or not isfinite(norm * scale):
            self.scaled_clip_steps = 0
            return
        scaled = 1 / _SAME_NORM < seen / (norm * scale) < _SAME_NORM
        self.scaled_clip_steps = self.scaled_clip_steps + 1 if scaled else 0

    @property
    def restarted(self) -> bool:
        """Whether the learning rate schedule restarted recently."""
        return self.restarted_steps is not None and self.restarted_steps < RESTART_STEPS

    def confirm(self, *, trouble: bool) -> bool:
        """Return whether trouble proves that the end of a plateau was a jump of the rate."""
        if self.suspect_steps is None:
            return False
        self.suspect_steps += 1
        if trouble:
            self.rate_jumped = True
        if trouble or self.suspect_steps > _SUSPECT_STEPS:
            self.suspect_steps = None
        return trouble

    def _fold_rate(self, rate: float | None, jump: float) -> None:
        self.rate_jumped = self.rate_raised = False
        if rate is None:
            return
        self.rates += 1
        warmed_up = self.rates > WARM_UP_STEPS or self.rises >= _GRADUAL_RISES
        settled = warmed_up and self.highest_rate > 0.0
        far = settled and rate >= jump * self.highest_rate
        self.rate_raised = settled and rate >= sqrt(jump) * self.highest_rate
        if far and not self.rate_changed and self.rates <= _PLATEAU_STEPS:
            self.suspect_steps = 0
        else:
            self.rate_jumped = far
        self._fold_restart(rate)
        self.rate_changed |= self.highest_rate > 0.0 and rate != self.highest_rate
        self.rises = min(self.rises + (rate > self.highest_rate), _GRADUAL_RISES)
        self.highest_rate = max(self.highest_rate, rate)

    def _fold_restart(self, rate: float) -> None:
        last, self.last_rate = self.last_rate, rate
        again = last is not None and last < rate <= self.highest_rate
        known, factor = self.restarted_steps, _RESTART_FACTOR
        # A rate that oscillates all the time explains nothing.
        if again and rate >= factor * (last or 0.0) and (known is None or known > _RESTARTS_APART):
            self.restarted_steps = 0
        elif known is not None:
            self.restarted_steps = known + 1


def _is_clipped_away(limit: float | None, norm: float | None) -> bool:
    if limit is None or norm is None or not isfinite(norm):
        return False
    return 0.0 <= limit <= _LIMIT_ALMOST_0 and norm > _FAR_ABOVE_LIMIT * limit


_FALL_STEPS = 64
"""Steps within which no schedule is meant to collapse while the run continues."""
_FALLEN_STEPS = 16
"""Steps at such a rate: of those schedules that end at 0 within so few steps, cosine and straight
ones have at most two, and a cubic one has six."""
_OTHER_SCHEDULE = 20.0
"""Factor by which a rate that falls at once belongs to another schedule, as after a search."""


@dataclass(slots=True, kw_only=True)
class RateFall(ModelTracker):
    """Finds a learning rate that collapses within a few steps, and stays low."""

    rates: list[float] = field(default_factory=list)
    """The last ones."""
    low_steps: int = 0
    """Consecutive steps with a rate far below the highest of these."""
    begin_step: int | None = None
    """The trainer's step of the first of them."""
    found: bool = False
    """Whether the last step is the one from which that counts."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step; a rate of 0 is another matter."""
        rate, self.found = step.get("learning_rate"), False
        if not rate:
            self.low_steps = 0
            return
        if self.rates and rate < self.rates[-1] / _OTHER_SCHEDULE:
            self.rates = []
        self.rates = [*self.rates[1 - _FALL_STEPS :], rate]
        if rate < context.thresholds["learning_rate_fall"] * max(self.rates):
            self.low_steps += 1
            self.begin_step = step.step if self.low_steps == 1 else self.begin_step
            self.found = self.low_steps == _FALLEN_STEPS
        else:
            self.low_steps = 0


NEVER_STEPS = "optimizer never steps"
MISTAKES: Mapping[str, str] = {
    GRADIENTS_ADD_UP: "gradients add up",
    BACKWARDS_DISCARDED: "gradients discarded",
    LATE_CLIPPING: "clipping after the step",
    STEP_REPEATED: "step repeated",
    STEP_SCALED: "scaled gradients",
    OPTIMIZER_NEVER_STEPS: NEVER_STEPS,
    ACCUMULATION_BYPASSED: "accumulation bypassed",
    LEFT_IN_EVALUATION: "evaluation mode",
    CLIPS_NOTHING: "clipping without gradients",
    CLIPPED_APART: "clipping one by one",
    CLIPPED_BY_SHARD: "clipping by shard",
    SEED_REPEATED: "seed repeated",
    EPOCH_REPEATED: "epoch repeated",
    FP16_WITHOUT_LOSS_SCALE: "FP16 without a loss scale",
    LOSS_INPUT_MISMATCH: "loss input mismatch",
    TARGETS_BROADCAST: "targets broadcast",
    LOSS_IN_16_BITS: "loss in 16 bits",
    TARGETS_MISALIGNED: "targets misaligned",
    PADDING_IN_TARGETS: "padding in targets",
    TARGETS_SEEN: "targets seen",
    EVALUATED_IN_TRAINING: "evaluation in training mode",
    BATCH_NORM_MOMENTUM: "batch norm momentum",
    BETAS_SWAPPED: "betas swapped",
}
"""What a step column that is above 0 shows."""


@dataclass(slots=True, kw_only=True)
class LoopTracker(Tracker):
    """For how many steps in a row the loop has made a mistake, and autocast had no effect."""

    steps: dict[str, int] = field(default_factory=dict)
    """Consecutive steps by mistake."""
    discarded: float | None = None
    """Backwards of the last of the steps with such whose gradients were discarded."""
    fp32_share: float | None = None
    fp32_samples: int = 0

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step; one that a scaler has skipped used no gradients."""
        if step.skipped:
            return
        found = [mistake for column, mistake in MISTAKES.items() if step.flag(column)]
        factor = step.get(GRADIENT_FACTOR)
        if factor is not None and abs(factor - 1.0) > UNTOUCHED:  # the script's own gradients
            found = [mistake for mistake in found if mistake != MISTAKES[BACKWARDS_DISCARDED]]
        self.steps = {mistake: self.steps.get(mistake, 0) + 1 for mistake in found}
        self.discarded = step.get(BACKWARDS_DISCARDED)
        if (share := step.get(AUTOCAST_FP32_SHARE)) is not None:
            high = share > context.thresholds["autocast_fp32_share"]
            self.fp32_share, self.fp32_samples = share, self.fp32_samples + 1 if high else 0

    def view(self) -> LoopMistakes:
        """Return for how long each lasts."""
        return LoopMistakes(
            steps=self.steps,
            discarded=self.discarded,
            fp32_share=self.fp32_share,
            fp32_samples=self.fp32_samples,
        )
