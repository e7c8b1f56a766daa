"""What the conditions of the loss scale have in common."""

from mp_agent.alerting.conditions.guards import calibrated, restarted, standing
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Track, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, Joined, Predicate, all_of, unless
from mp_agent.alerting.expressions.signals import Count, Recorded, Series, limit

WINDOW = duration("loss_scale_window")
SCALE = Series(metric=metrics.LOSS_SCALE, aggregate="min")
CALIBRATED = Series(metric=metrics.LOSS_SCALE_CALIBRATED)
INITIAL = Series(metric=metrics.LOSS_SCALE_INITIAL)
FALLEN = Compare(SCALE, "<=", limit("loss_scale_share_of_calibrated") * CALIBRATED)
"""Three times halved since calibration: a halving or two come and go in any healthy run."""
DECREASES = Recorded(
    "run:mp_agent_loss_scale_decreases:increase",
    Count(metric=metrics.LOSS_SCALE_DECREASES, window=WINDOW),
)

_ALIVE = duration("alive_window")


def hung() -> Predicate:
    """Return whether the run has ceased to make steps: its scale says nothing new."""
    return standing(_ALIVE)


def resumed_elsewhere(steps_per_minute: float, samples: int) -> tuple[Track, ...]:
    """Return, for examples, the steps of a run resumed at step 90 000 under a new node agent."""
    return (
        Track(metrics.STEP, ramp(90_000, steps_per_minute, samples)),
        Track(metrics.STEPS, ramp(1, steps_per_minute, samples)),
    )


def counted_anew(steps_per_minute: float, samples: int) -> tuple[Track, ...]:
    """Return, for examples, the step of a run that restarts its count in minute 10."""
    return (Track(metrics.STEP, (*ramp(5000, 60, 10), *ramp(1, steps_per_minute, samples - 10))),)


def after_calibration(*claims: Predicate) -> Joined:
    """Hold claims on the scale of a run that makes steps, long after its calibration."""
    return unless(all_of(*claims, calibrated(WINDOW)), restarted(), hung())
