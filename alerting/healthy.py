"""The series of a run in good health: FP16 with a scaler, long past calibration."""

from collections.abc import Mapping

from mp_agent.alerting import metrics
from mp_agent.alerting.examples import Track, Value, ramp
from mp_agent.alerting.signals import Limit, limit
from mp_agent.catalog.metric import Metric

_STEPS_PER_MINUTE = 60
_CONSTANT: Mapping[Metric, float] = {
    metrics.RUN_ACTIVE: 1,
    metrics.COVERAGE: 1,
    metrics.GRAD_FINITE: 1,
    metrics.GRAD_NORM: 1.2,
    metrics.GRAD_NORM_WINDOW_MAX: 1.9,
    metrics.LOSS_SCALE: 65536,
    metrics.LOSS_SCALE_INITIAL: 65536,
    metrics.LOSS_SCALE_DECREASES: 0,
    metrics.LOSS_SCALE_INCREASES: 0,
    metrics.LOSS_SCALE_FLOOR_SKIPS: 0,
    metrics.SKIPPED_STEPS: 0,
    metrics.CLIPPED_STEPS: 0,
    metrics.LOSS_NONFINITE_STEPS: 0,
    metrics.NONFINITE_UPDATES: 0,
}


def healthy_tracks(minutes: int) -> tuple[Track, ...]:
    """Return the series of a healthy run, from minute 0 to `minutes`."""
    samples = minutes + 1
    return (
        *(Track(metric, (value,)) for metric, value in _CONSTANT.items()),
        *(
            Track(metrics.GRAD_NORM_EXCEEDED, (0,), {"bound": limit(name)})
            for name in ("grad_norm_high", "grad_norm_extreme")
        ),
        Track(metrics.PHASE, (1,), {"phase": "forward"}),
        Track(metrics.STEP, ramp(5000, _STEPS_PER_MINUTE, samples)),
        Track(metrics.STEPS, ramp(5000, _STEPS_PER_MINUTE, samples)),
        Track(metrics.STEP_DURATION, ramp(5000, 60, samples), suffix="_sum"),
        Track(metrics.STEP_DURATION, ramp(5000, _STEPS_PER_MINUTE, samples), suffix="_count"),
        Track(metrics.LOSS, noisy(2.0, samples)),
        Track("up", (1,)),
    )


def noisy(mean: float, samples: int, *, slope: float = 0.0) -> tuple[Value, ...]:
    """Return a loss around `mean` that jumps by some percent and drifts by `slope` a minute."""
    jumps = ((index * 7 % 11) / 11 - 0.45 for index in range(samples))
    return tuple(mean * (1 + 0.1 * jump) + slope * index for index, jump in enumerate(jumps))


def same_series(one: Track, other: Track) -> bool:
    """Return whether two tracks are of one series."""
    return one.name == other.name and _labels(one) == _labels(other)


def _labels(track: Track) -> set[tuple[str, str | Limit]]:
    return set(track.labels.items())
