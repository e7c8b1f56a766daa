"""Alerts on the size of a run's gradients: exploding, vanishing, at the format's floor."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened, loss_falling, standing, unjudgeable
from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.metrics import (
    GRAD_ABS_MIN,
    LAYERS_UNDERFLOWING,
    LOSS_SCALE,
)
from mp_agent.alerting.expressions.terms import (
    Compare,
    Count,
    Either,
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
from mp_agent.alerting.remedies import CLIPS, CLIPS_NOT, FP16, Remedy
from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metric import Metric

HIGH, EXTREME = limit("grad_norm_high"), limit("grad_norm_extreme")

_COUNT = "{value|count}"
_DESCRIPTION = (
    f"The gradient norm of run {{run}} was above <LIMIT>, and <grad_norm_growth> times its usual "
    f"value or more, on {_COUNT} step(s) in the last <explosion_window>"
)
CONTAINED = "; all of them were clipped, and the loss stayed at its usual level"


def describe(bound: Limit, end: str = "") -> str:
    """Return the description of a level, with marks; end: what else it says."""
    return f"{_DESCRIPTION}{end}.".replace("LIMIT", bound.threshold.name)


_WINDOW = duration("explosion_window")


def _steps(metric: Metric, bound: Limit, name: str) -> Recorded:
    count = Count(metric=metric, window=_WINDOW, where=(Where("bound", "=", bound),))
    return Recorded(f"run:mp_agent_{bound.threshold.name}_{name}:increase", count)


def _steps_above(bound: Limit) -> Recorded:
    return _steps(metrics.GRAD_EXPLODED, bound, "exploded_steps")


def _all_clipped(bound: Limit) -> Predicate:
    return Compare(
        _steps(metrics.GRAD_EXPLODED_UNCLIPPED, bound, "unclipped_steps"), "==", Number(0)
    )


def _loss_calm() -> Joined:
    """Return whether the loss stayed within its baseline; without one it is not calm.

    The rolling median follows the loss of a run that was thrown back; the best level does not.
    """
    return unless(
        Seen(Series(metric=metrics.LOSS_MEDIAN)),
        happened(Count(metric=metrics.LOSS_SPIKE_STEPS, window=_WINDOW)),
        happened(Count(metric=metrics.LOSS_NONFINITE_STEPS, window=_WINDOW)),
        happened(Series(metric=metrics.LOSS_LOST_STEPS)),
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
                weights="probably damaged, since updates of this size were applied",
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
            hold=duration("explosion_hold"),
            description=describe(HIGH),
            reason="Two evaluations must see it; the counter keeps the step visible for "
            "explosion_window.",
        ),
        Level(
            severity=Severity.INFO,
            when=all_of(happened(_steps_above(HIGH)), _tamed(HIGH)),
            hold=duration("explosion_hold"),
            description=describe(HIGH, CONTAINED),
            reason="As for the warning, which it replaces.",
        ),
    ),
    quiet=(
        "norms up to 99, scaled by 65536 in backward",
        "the finite part of a skipped overflow step, which exceeds no bound",
        "norms of thousands since the first step, as with a summed loss",
    ),
)


_STEPS = Number(3)
"""Below which a step or two say nothing."""
_HIGHEST_NORM = Either(
    Series(metric=metrics.GRAD_NORM_WINDOW_MAX), Series(metric=metrics.GRAD_NORM)
)
"""Steps slower than the window leave it empty; then the last norm is the highest."""


def _below(bound: Limit) -> tuple[Predicate, Predicate]:
    """Return what to hold, and the excuse that every level accepts.

    Of a run that hangs after a step with a tiny norm nothing more is known than that step.
    """
    steps = Series(
        metric=metrics.GRAD_NORM_BELOW, where=(Where("limit", "=", bound.threshold.name),)
    )
    below = all_of(Compare(_HIGHEST_NORM, "<", bound), Compare(steps, ">=", _STEPS))
    return below, unjudgeable()


def _small_by_nature() -> Predicate:
    """Return whether the norm is close to its largest value so far: the loss has small units."""
    return Compare(
        _HIGHEST_NORM, ">", limit("grad_norm_fall") * Series(metric=metrics.GRAD_NORM_PEAK)
    )


def _description(bound: Limit, hold: Duration) -> str:
    return (
        "The gradient norm of run {run} has been below "
        f"<{bound.threshold.name}> for <{hold.name}>; it is {{value|number}}."
    )


_REASON = (
    "The weaker the evidence, the longer the delay: small norms are often temporary, and a step "
    "above the limit within window_seconds resets the delay."
)
_LOW, _LOW_HOLD = limit("grad_norm_low"), duration("vanishing_low_hold")
_VERY_LOW, _VERY_LOW_HOLD = limit("grad_norm_very_low"), duration("vanishing_very_low_hold")
_KEEP = duration("vanishing_keep")
"""Noise of the loss looks now and then as if something were learned."""
_VANISHED, _GRADIENT_VANISHING_HOLD = limit("grad_norm_vanished"), duration("vanishing_hold")


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
            when=unless(*_below(_VANISHED), loss_falling(), _small_by_nature()),
            hold=_GRADIENT_VANISHING_HOLD,
            keep=_KEEP,
            reason=_REASON,
            description=_description(_VANISHED, _GRADIENT_VANISHING_HOLD),
        ),
        Level(
            severity=Severity.WARNING,
            when=unless(*_below(_VERY_LOW), loss_falling(), _small_by_nature()),
            hold=_VERY_LOW_HOLD,
            keep=_KEEP,
            reason=_REASON,
            description=_description(_VERY_LOW, _VERY_LOW_HOLD),
        ),
        Level(
            severity=Severity.INFO,
            when=unless(*_below(_LOW)),
            hold=_LOW_HOLD,
            reason=_REASON,
            description=_description(_LOW, _LOW_HOLD),
        ),
    ),
    quiet=(
        "zeros left by clipping after an Inf",
        "a run that hangs after a step with a tiny norm",
        "merged steps without one rank",
        "low norms with a healthy step every few minutes",
    ),
)


_GRADIENT_AT_FLOOR_HOLD = duration("underflow_hold")
_FLOOR = 2.0**-24
"""FP16's smallest number above zero."""
_SMALLEST = Series(metric=GRAD_ABS_MIN) * Series(metric=LOSS_SCALE)
_AT_FLOOR = all_of(
    Compare(_SMALLEST, ">=", Number(0.999 * _FLOOR)),
    Compare(_SMALLEST, "<=", Number(1.001 * _FLOOR)),
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
            when=unless(
                all_of(_AT_FLOOR, Compare(Series(metric=LAYERS_UNDERFLOWING), ">", Number(0))),
                standing(_GRADIENT_AT_FLOOR_HOLD),
            ),
            hold=_GRADIENT_AT_FLOOR_HOLD,
            description="The smallest gradients of run {run} lie at FP16's smallest number, and "
            "some layers have far more zeros than at the start: what was smaller was lost.",
            reason="Several looks must see it, since a batch can be odd.",
        ),
    ),
    quiet=(
        "smallest gradients at FP16's smallest number, and no more zeros than at the start",
        "more zeros, but smallest gradients well above FP16's smallest number: sparsity",
        "smallest gradients below FP16's smallest number: those of layers that run in FP32",
        "a run that hung after a single look at an odd batch",
    ),
)


_FLUSHED = Series(metric=metrics.GRAD_FP16_FLUSHED, where=(Where("scale", "=", "in_force"),))
_HEADROOM = Series(metric=metrics.GRAD_FP16_HEADROOM, aggregate="min")


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
                Compare(_HEADROOM, "<", limit("fp16_headroom_bits")),
            ),
            hold=duration("headroom_hold"),
            description="No loss scale suits run {run} any more: {value|percent} of the gradients "
            "are lost below FP16's smallest number, and the next doubling of the scale overflows.",
            reason="The delay covers several samples, because a single batch can be unusual.",
        ),
    ),
    quiet=(
        "a scale that can still grow",
        "a scale at its upper limit that loses next to nothing",
        "a few unusual samples",
    ),
)
