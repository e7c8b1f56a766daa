"""What several conditions ask of a run before they judge it, and texts that they share."""

from mp_agent.alerting import metrics
from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.predicates import (
    Compare,
    Joined,
    Predicate,
    Seen,
    all_of,
    any_of,
    unless,
)
from mp_agent.alerting.signals import (
    Either,
    Length,
    Number,
    Recorded,
    Series,
    Signal,
    Where,
    limit,
)
from mp_agent.catalog.metric import Metric
from mp_agent.records.steps import Phase

_ZERO = Number(0)
_TRAINING = "|".join(
    phase.name.lower() for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
)


def calibrated(window: Duration) -> Joined:
    """Tell whether GradScaler's search for its scale was over before the window.

    Both counts are asked: a job resumed at step 90 000 starts a new search with a new scaler.
    """
    return all_of(
        *(
            Compare(_lowest(metric, window), ">", limit("calibration_steps"))
            for metric in (metrics.STEP, metrics.STEPS)
        )
    )


def _lowest(metric: Metric, window: Duration) -> Recorded:
    signal = Series(metric=metric, aggregate="min", over=("min_over_time", window))
    name = metric.prometheus_name.removesuffix("_total")
    return Recorded(f"run:{name}:min_{window.name}", signal)


def restarted() -> Predicate:
    """Tell whether the step went back: the job was resumed, its scaler may start anew."""
    resets = Series(metric=metrics.STEP, over=("resets", duration("restart_window")))
    return Compare(Recorded("run:mp_agent_step:resets", resets), ">", _ZERO)


def standing(window: Duration) -> Predicate:
    """Tell whether no step was made in the window. By change: clocks of nodes differ."""
    return Compare(Series(metric=metrics.STEP, over=("changes", window)), "==", _ZERO)


def stopped(window: Duration) -> Joined:
    """Tell whether no step was made for `window`, active at its start and training throughout.

    A run whose usual step takes a tenth of the window or more is not judged.
    """
    changes = Either(
        Series(metric=metrics.STEP, over=("changes", window)),
        Series(metric=metrics.STEPS, over=("changes", window)),
    )
    elsewhere = (Where("phase", "!~", _TRAINING),)
    return unless(
        all_of(
            Compare(changes, "==", _ZERO),
            Compare(Series(metric=metrics.RUN_ACTIVE, before=(window,)), "==", Number(1)),
        ),
        Seen(Series(metric=metrics.PHASE, over=("present_over_time", window), where=elsewhere)),
        Compare(limit("stall_steps") * Series(metric=metrics.STEP_USUAL), ">", Length(window)),
    )


def active() -> Compare:
    """Tell whether the run goes on."""
    return Compare(Series(metric=metrics.RUN_ACTIVE), "==", Number(1))


def unjudgeable() -> Predicate:
    """Tell whether the last step was non-finite or did not cover all ranks."""
    return any_of(
        Compare(Series(metric=metrics.GRAD_FINITE, aggregate="min"), "==", _ZERO),
        Compare(Series(metric=metrics.COVERAGE, aggregate="min"), "<", Number(1)),
    )


def happened(count: Signal) -> Predicate:
    """Tell whether what is counted happened at least once."""
    return Compare(count, ">", _ZERO)


FIRST_NONFINITE = "{mp_agent_first_nonfinite_info| First seen at |step rank layer phase}"
"""Says in a description where an incident began, as far as evidence names it."""
