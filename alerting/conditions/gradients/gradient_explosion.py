"""MpAgentGradientExplosion."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.gradients.gradient_explosion_examples import (
    CONTAINED,
    EXTREME,
    FIRING,
    HIGH,
    QUIET,
    describe,
)
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import (
    Compare,
    Joined,
    Predicate,
    Seen,
    all_of,
    unless,
)
from mp_agent.alerting.expressions.signals import Count, Limit, Number, Recorded, Series, Where
from mp_agent.alerting.first_line.triage import ROLL_BACK, Triage
from mp_agent.alerting.remedies import CLIPS, CLIPS_NOT, Remedy
from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metric import Metric

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
    firing=FIRING,
    quiet=QUIET,
)
