"""Alerts on the size of a run's gradients: exploding, vanishing, at the format's floor."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above, less_below
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import (
    happened,
    loss_falling,
    sustained,
    sustained_steps,
    unjudgeable,
)
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import (
    Compare,
    Count,
    Joined,
    Limit,
    Number,
    Predicate,
    Recorded,
    Seen,
    Series,
    Where,
    all_of,
    limit,
    unless,
)
from mp_agent.alerting.first_line import ROLL_BACK, UPDATED, Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.remedies import CLIPS, CLIPS_NOT, FP16, Remedy
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.metrics import distribution, gradient_layers, gradients, run, training

HIGH, EXTREME = limit("grad_norm_high"), limit("grad_norm_extreme")

_COUNT = "{value|count}"
_DESCRIPTION = (
    f"The gradient norm of run {{run}} was above <LIMIT>, and <grad_norm_growth> times its usual "
    f"value or more, on {_COUNT} step(s) in the last <explosion_window>"
)
CONTAINED = "; clipping or the guard contained all of them, and the loss stayed at its usual level"


def describe(bound: Limit, end: str = "") -> str:
    """Return the description of a level, with marks; end: what else it says."""
    return f"{_DESCRIPTION}{end}.".replace("LIMIT", bound.threshold.name)


_WINDOW = duration("explosion_window")


def _steps(metric: Metric, bound: Limit, name: str) -> Recorded:
    count = Count(metric=metric, window=_WINDOW, where=(Where("bound", "=", bound),))
    return Recorded(f"run:mp_agent_{bound.threshold.name}_{name}:increase", count)


def _steps_above(bound: Limit) -> Recorded:
    return _steps(gradient_layers.GRAD_EXPLODED, bound, "exploded_steps")


def _all_clipped(bound: Limit) -> Predicate:
    return Compare(
        _steps(gradient_layers.GRAD_EXPLODED_UNCLIPPED, bound, "unclipped_steps"), "==", Number(0)
    )


def _loss_calm() -> Joined:
    """Return whether the loss stayed within its baseline; without one it is not calm.

    The rolling median follows the loss of a run that was thrown back; the best level does not.
    """
    return unless(
        Seen(Series(metric=training.LOSS_MEDIAN)),
        happened(Count(metric=training.LOSS_SPIKE_STEPS, window=_WINDOW)),
        happened(Count(metric=run.LOSS_NONFINITE_STEPS, window=_WINDOW)),
        happened(Series(metric=training.LOSS_LOST_STEPS)),
    )


def _tamed(bound: Limit) -> Joined:
    return all_of(_all_clipped(bound), _loss_calm())


def _single_clipped() -> Joined:
    return all_of(Compare(_steps_above(EXTREME), "<", Number(2)), _all_clipped(EXTREME))


GRADIENT_EXPLOSION = Condition(
    name="MpAgentGradientExplosion",
    summary="Gradients are exploding.",
    meaning="Single updates become large enough to damage the weights; the loss jumps or diverges.",
    confirm="Plot mp_agent_grad_norm_window_max, mp_agent_grad_norm_usual and mp_agent_loss; "
    "mp_agent_layer_grad_norm identifies the layer, mp_agent_grad_norm by optimizer the model.",
    remedies=(
        Remedy(
            "Clip gradients after unscale_ and before step: a max norm of 1.0 is usual, 0.5 for "
            "large or unstable models, 5.0 for small stable ones.",
            CLIPS_NOT,
        ),
        Remedy(
            "Gradients are clipped already, so a lower limit hardly helps: find out what changed.",
            CLIPS,
        ),
        "Reduce the learning rate tenfold.",
        "Check that inputs are normalized and that residual branches contain a normalization.",
    ),
    why="Clipping bounds the length of a single update without changing its direction; a "
    "smaller learning rate and normalized values prevent the norm from growing.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="probably damaged, since not all of these updates are known to have been "
                "contained",
                now=ROLL_BACK,
            ),
            when=unless(
                happened(_steps_above(EXTREME)),
                _tamed(EXTREME),
                _single_clipped(),
            ),
            description=describe(EXTREME),
            reason="No delay: a single such step can destroy the weights.",
        ),
        Level(
            severity=Severity.WARNING,
            when=unless(
                happened(_steps_above(HIGH)),
                unless(_tamed(HIGH), happened(_steps_above(EXTREME))),
            ),
            description=describe(HIGH),
            reason="No delay: the counter keeps the step visible for explosion_window.",
        ),
        Level(
            severity=Severity.INFO,
            when=all_of(happened(_steps_above(HIGH)), _tamed(HIGH)),
            description=describe(HIGH, CONTAINED),
            reason="As for the warning, which it replaces.",
        ),
    ),
    quiet=(
        "norms up to 99, scaled by 65536 in backward",
        "the finite part of a skipped overflow step, which exceeds no bound",
        "norms of thousands since the first step, as with a summed loss",
    ),
    follows_from=(
        "MpAgentReplicaDivergence",
        "MpAgentClippingBeforeUnscale",
        "MpAgentLearningRateJump",
        "MpAgentGradientsAddUp",
        "MpAgentClippingAfterStep",
    ),
    needs=((Quantity.GRAD_NORM,),),
    usual=Quantity.GRAD_NORM,
    knobs=(less_above("grad_norm_growth"), less_above("grad_norm_high", "grad_norm_extreme")),
    guidance=Guidance(
        harm="Critical: a single unclipped update of this size can undo days of training; act "
        "within minutes, before the next checkpoint overwrites a good one. Warning: the run is "
        "close to that. Info: clipping contains it; investigate during working hours.",
        query='max_over_time(mp_agent_grad_norm_window_max{run="RUN",optimizer=""}[10m])',
        reading="The largest gradient norm of the last ten minutes; most healthy runs stay "
        "between 0.1 and 10. Compare it with mp_agent_grad_norm_usual, the run's own level, and "
        "with the loss over the same time: a loss that jumped means that the weights are damaged. "
        "If several optimizers train one model, this is the norm over all of them; the label "
        "optimizer has the norm of each.",
        causes=(
            "The learning rate is too high for this stage, or its warm-up is too short.",
            "Clipping is missing, or runs before unscale_, so that its limit applies to gradients "
            "that are still multiplied by the loss scale.",
            "A batch of corrupt or unusual data: check the loss per rank at that step.",
            "Residual branches without normalization, or an initialization that is too large.",
            "The optimizer state was lost at a restart, so Adam's first steps are too large.",
        ),
        false_positives=(
            "Norms that change level on purpose, such as when layers are unfrozen or a loss term "
            "is added: the new level becomes the usual one after some hundred steps.",
            "An objective that one sample estimates, as in variational inference: single gradients "
            "far beyond the usual are noise. Average over more samples, or clip.",
            "Reinforcement learning, whose loss follows the returns: if it has spiked within "
            "explosion_window, this is a warning even where clipping contains every update.",
            "Clipping that hooks cannot see (custom code, a whole step under torch.compile): the "
            "agent does not know that it contains the norm. The label measuring_point of "
            "mp_agent_run_info says what is measured.",
        ),
        samples=("clip_after_unscale", "smaller_learning_rate"),
        panels=(panels.GRADIENT_NORM, panels.STEPS_BEYOND_LIMITS, panels.CLIPPING, panels.LOSS),
    ),
)


_NORM = Series(metric=gradients.GRAD_NORM)


def _steps_below(name: str) -> Series:
    """Return on how many steps in a row the norm was below a threshold."""
    return Series(metric=gradient_layers.GRAD_NORM_BELOW, where=(Where("limit", "=", name),))


def _below(name: str) -> tuple[Predicate, Predicate]:
    """Return what to have for so many steps, and the excuse that every level accepts."""
    long_enough = Compare(_steps_below(name), ">=", limit(f"{name}_steps"))
    return all_of(Compare(_NORM, "<", limit(name)), long_enough), unjudgeable()


def _small_by_nature() -> Predicate:
    """Return whether the norm is close to its largest value so far: the loss has small units."""
    return Compare(
        _NORM, ">", limit("grad_norm_fall") * Series(metric=gradient_layers.GRAD_NORM_PEAK)
    )


def _solved() -> Predicate:
    """Return whether there is hardly any loss left to make gradients of."""
    return happened(Series(metric=training.LOSS_SOLVED, aggregate="min"))


def _description(name: str) -> str:
    return (
        f"The gradient norm of run {{run}} has been below <{name}> for <{name}_steps> steps or "
        "more; it is {value|number}."
    )


_EXCUSES = (loss_falling(), _small_by_nature(), _solved())
_REASON = (
    "No delay: it takes so many steps, more the weaker the evidence, since small norms are often "
    "temporary; a single step above the limit starts again from 0."
)
_KEEP = duration("vanishing_keep")
"""Noise of the loss looks now and then as if something were learned."""


GRADIENT_VANISHING = Condition(
    name="MpAgentGradientVanishing",
    summary="Gradients are vanishing.",
    meaning="Updates are too small to change the weights: the run uses compute without learning.",
    confirm="Plot mp_agent_grad_norm and mp_agent_loss; mp_agent_layer_grad_zero_ratio shows where "
    "gradients underflow.",
    remedies=(
        Remedy("Use a larger loss scale, or BF16, if gradients underflow FP16.", FP16),
        "Add normalization and residual paths.",
        "Check for frozen or detached branches, and for a learning rate that has decayed to zero.",
    ),
    why="Small gradients fall below the smallest FP16 number unless they are scaled up, and "
    "deep paths without normalization or residual connections shrink them from layer to layer.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="intact, but no longer changing",
                now="save a checkpoint, and stop: the run learns nothing",
                updated=UPDATED,
            ),
            when=unless(*_below("grad_norm_vanished"), *_EXCUSES),
            keep=_KEEP,
            reason=_REASON,
            description=_description("grad_norm_vanished"),
            counted=_steps_below("grad_norm_vanished"),
        ),
        Level(
            severity=Severity.WARNING,
            when=unless(*_below("grad_norm_very_low"), *_EXCUSES),
            keep=_KEEP,
            reason=_REASON,
            description=_description("grad_norm_very_low"),
            counted=_steps_below("grad_norm_very_low"),
        ),
        Level(
            severity=Severity.INFO,
            when=unless(*_below("grad_norm_low"), _solved()),
            reason=_REASON,
            description=_description("grad_norm_low"),
            counted=_steps_below("grad_norm_low"),
        ),
    ),
    quiet=(
        "zeros left by clipping after an Inf",
        "a run that hangs after a step with a tiny norm",
        "merged steps without one rank",
        "low norms with a healthy step now and then",
        "a solved task, whose loss is 0.0 at its best",
    ),
    follows_from=("MpAgentNothingTrained",),
    needs=((Quantity.GRAD_NORM,),),
    knobs=(
        less_below("grad_norm_low", "grad_norm_very_low", "grad_norm_vanished"),
        less_below("grad_norm_fall"),
    ),
    guidance=Guidance(
        harm="No state is damaged, but the run uses compute without learning. Critical: updates "
        "are effectively zero; stop the run. Warning and info: decide within hours.",
        query='mp_agent_grad_norm_window_max{run="RUN",optimizer=""}',
        reading="The largest norm of the last two minutes. Below 0.001 with a constant loss, the "
        "run has stopped learning; with a loss that still falls, it converges.",
        causes=(
            "In FP16, gradients underflow because the loss scale has fallen: check the loss scale "
            "over the last hours.",
            "A branch was detached or frozen by mistake, so only few parameters learn.",
            "The learning-rate schedule or a loss weight has decayed to zero.",
            "Saturated activations, or deep paths without residual connections and normalization.",
        ),
        false_positives=(
            "A small fine-tuning run that has converged: stop it, or lower grad_norm_low.",
            "A loss divided by a large constant (tokens times ranks) has small norms from the "
            "first step and raises at most an info alert: lower grad_norm_low.",
        ),
        samples=("dead_parameters", "underflow_share"),
        panels=(panels.GRADIENT_NORM, panels.ZERO_ELEMENTS, panels.LOSS),
    ),
)


GRADIENT_AT_FLOOR = Condition(
    name="MpAgentGradientAtFloor",
    summary="Small gradients are lost below FP16's smallest number.",
    meaning="The new zeros in some layers are underflow, not sparsity: the smallest gradients that "
    "are left lie exactly at the smallest number of FP16.",
    confirm="mp_agent_grad_abs_min times mp_agent_loss_scale, which is 5.96e-8, and "
    "mp_agent_layer_grad_abs_min of the layers that mp_agent_underflowing_layer_info names.",
    remedies=(
        Remedy(
            "Use a larger loss scale: raise growth_factor or lower growth_interval if GradScaler "
            "has room, which mp_agent_grad_fp16_headroom shows.",
            FP16,
        ),
        Remedy("Train in BF16, whose smallest numbers are those of FP32.", FP16),
        "Divide the loss by large numbers, such as token counts, after its backward.",
    ),
    why="A larger scale moves gradients up from the gap between zero and 6e-8, and BF16 has no "
    "such gap.",
    levels=(
        Level(
            severity=Severity.INFO,
            when=sustained("fp16_floor"),
            description="The smallest gradients of run {run} lie at FP16's smallest number, and "
            "some layers have far more zeros than at the start: what was smaller was lost.",
            counted=sustained_steps("fp16_floor"),
            reason="No delay: all samples of sustained_steps steps must see it, since a batch can "
            "be odd.",
        ),
    ),
    quiet=("a few samples of odd batches",),
    needs=((Quantity.LOSS_SCALE, Quantity.SMALLEST),),
    guidance=Guidance(
        harm="A small part of the gradient is rounded to zero in some layers; the run goes on. "
        "Look when you next tune the loss scale, sooner if MpAgentGradientUnderflow follows.",
        query='mp_agent_grad_abs_min{run="RUN",optimizer=""} '
        '* ignoring(optimizer) mp_agent_loss_scale{run="RUN"}',
        reading="The smallest gradient as FP16 held it. 5.96e-8 is the smallest number of FP16: "
        "all smaller ones became zero. mp_agent_layer_grad_abs_min shows in which layers.",
        causes=(
            "The loss scale has fallen, or was given too low at the start.",
            "The loss is divided by a large number before its backward in FP16.",
            "Layers behind a very small loss weight.",
        ),
        false_positives=(
            "New zeros of another origin, such as rarely used embedding rows, in a run with so "
            "many gradients that its smallest one is always at the limit.",
        ),
        samples=("underflow_share",),
        panels=(panels.UNDERFLOWING_LAYERS, panels.MOST_ZEROS, panels.LOSS_SCALE),
    ),
)


_FLUSHED = Series(metric=distribution.GRAD_FP16_FLUSHED, where=(Where("scale", "=", "in_force"),))


HEADROOM_VANISHING = Condition(
    name="MpAgentHeadroomVanishing",
    summary="The gradients no longer fit into FP16's range at any loss scale.",
    meaning="Gradients lie too far apart: a larger loss scale overflows in the largest ones, and "
    "the present one already loses part of the smallest. The scale will fall, and more will be "
    "lost.",
    confirm="mp_agent_grad_fp16_flushed_ratio at the three scales, mp_agent_grad_fp16_headroom and "
    "mp_agent_grad_exponent_elements, which shows both ends.",
    remedies=(
        Remedy("Train in BF16, which has the exponent range of FP32.", FP16),
        "Find the layer with the largest gradients and normalize its inputs, or clip them there.",
        "Keep the layers with the smallest gradients in FP32.",
    ),
    why="The scale moves all gradients together: only a smaller distance between the largest and "
    "the smallest, or a format with more exponents, makes both fit. Judged only if the setting "
    "measure_distribution is on.",
    levels=(
        Level(
            severity=Severity.INFO,
            when=all_of(
                Compare(_FLUSHED, ">", limit("fp16_flushed")),
                sustained("fp16_flushed"),
            ),
            description="No loss scale suits run {run} any more: {value|percent} of the gradients "
            "are lost below FP16's smallest number, and the next doubling of the scale overflows.",
            counted=sustained_steps("fp16_flushed"),
            reason="No delay: it takes all samples of sustained_steps steps, because a single "
            "batch can be unusual.",
        ),
    ),
    quiet=(
        "a scale that can still grow",
        "a scale at its upper limit that loses next to nothing",
        "a few unusual samples",
    ),
    follows_from=("MpAgentGradientExplosion", "MpAgentGradientUnderflow"),
    needs=((Quantity.DISTRIBUTION,),),
    knobs=(less_above("fp16_flushed"), less_below("fp16_headroom_bits")),
    guidance=Guidance(
        harm="A small part of the gradient is lost, and more will be as the scale falls. Look when "
        "you next tune the run.",
        query='mp_agent_grad_fp16_flushed_ratio{run="RUN"}',
        reading="The share of the non-zero gradients that FP16 rounds to zero, at half, at the "
        "present and at double the loss scale. At double it should be near 0; that this scale "
        "overflows is the trouble.",
        causes=(
            "One layer has far larger gradients than all others, such as an output layer or an "
            "embedding: it keeps the scale low for the rest.",
            "Gradients shrink with depth: residual paths or normalization are missing.",
            "A loss term with a small weight in addition to one with a large weight.",
        ),
        false_positives=(
            "Layers whose gradients are tiny and do not matter, such as biases before a "
            "normalization.",
        ),
        samples=("underflow_share", "overflowing_layer"),
        panels=(panels.GRADIENT_EXPONENTS, panels.FLUSHED, panels.LOSS_SCALE),
    ),
)


CONDITIONS = (
    GRADIENT_EXPLOSION,
    GRADIENT_VANISHING,
    GRADIENT_AT_FLOOR,
    HEADROOM_VANISHING,
)
