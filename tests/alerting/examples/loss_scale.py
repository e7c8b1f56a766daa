"""Parts of examples that several alerts share."""

from mp_agent.alerting.expressions import metrics
from tests.alerting.examples.example import Track, ramp


def resumed_elsewhere(steps_per_minute: float, samples: int) -> tuple[Track, ...]:
    """Return, for examples, the steps of a run resumed at step 90 000 under a new node agent."""
    return (
        Track(metrics.STEP, ramp(90_000, steps_per_minute, samples)),
        Track(metrics.STEPS, ramp(1, steps_per_minute, samples)),
    )


def counted_anew(steps_per_minute: float, samples: int) -> tuple[Track, ...]:
    """Return, for examples, the step of a run that restarts its count in minute 10."""
    return (Track(metrics.STEP, (*ramp(5000, 60, 10), *ramp(1, steps_per_minute, samples - 10))),)
