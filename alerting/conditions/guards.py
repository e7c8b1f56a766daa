"""What several conditions ask of a run before they judge it, and texts that they share."""

from mp_agent.alerting import metrics
from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.predicates import Compare, Joined, Predicate, all_of, any_of
from mp_agent.alerting.signals import Count, Number, Series, limit

_ZERO = Number(0)


def calibrated(window: Duration) -> Joined:
    """Tell whether GradScaler's search for its scale was over before the window.

    Both counts are asked: a job resumed at step 90 000 starts a new search with a new scaler.
    """
    return all_of(
        *(
            Compare(
                Series(metric=metric, aggregate="min", over=("min_over_time", window)),
                ">",
                limit("calibration_steps"),
            )
            for metric in (metrics.STEP, metrics.STEPS)
        )
    )


def restarted() -> Predicate:
    """Tell whether the step went back: the job was resumed, its scaler may start anew."""
    over = ("resets", duration("restart_window"))
    return Compare(Series(metric=metrics.STEP, over=over), ">", _ZERO)


def standing(window: Duration) -> Predicate:
    """Tell whether no step was made in the window. By change: clocks of nodes differ."""
    return Compare(Series(metric=metrics.STEP, over=("changes", window)), "==", _ZERO)


def unjudgeable() -> Predicate:
    """Tell whether the last step was non-finite or did not cover all ranks."""
    return any_of(
        Compare(Series(metric=metrics.GRAD_FINITE, aggregate="min"), "==", _ZERO),
        Compare(Series(metric=metrics.COVERAGE, aggregate="min"), "<", Number(1)),
    )


def happened(count: Count) -> Predicate:
    """Tell whether the counter's event happened at least once."""
    return Compare(count, ">", _ZERO)


def first_nonfinite() -> str:
    """Return the template that says where an incident began, as far as evidence names it."""
    matchers = ",".join(f"{label}=%q" for label in _IDENTITY)
    arguments = " ".join(f"$labels.{label}" for label in _IDENTITY)
    query = f'printf "{metrics.FIRST_NONFINITE.prometheus_name}{{{matchers}}}" {arguments}'
    named = "".join(
        f'{{{{ with . | label "{label}" }}}}, {label} {{{{ . }}}}{{{{ end }}}}'
        for label in ("rank", "layer", "phase")
    )
    return (
        f"{{{{ with {query} | query }}}}{{{{ with . | first }}}}"
        f' First seen at step {{{{ . | label "step" }}}}{named}.'
        f"{{{{ end }}}}{{{{ end }}}}"
    )


_IDENTITY = ("namespace", "job", "run")
