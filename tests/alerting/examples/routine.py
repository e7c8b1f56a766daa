"""What happens to runs every day: nothing of it may fire anything but what the example names."""

from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import run, training
from tests.alerting.examples.example import Example, Track, Value, flat, ramp

_STEP_BACK: tuple[Value, ...] = (*ramp(5000, 60, 20), *ramp(5400, 60, 51))

ROUTINE = (
    Example(title="nothing fires on an hour and a half of health", minutes=90),
    Example(
        title="nothing fires on a run that is restarted from its last checkpoint",
        minutes=70,
        tracks=(
            Track(run.STEP, _STEP_BACK),
            Track(run.RUN_ACTIVE, (*flat(1, 20), 0, 1)),
            Track(run.RUN_END, (*(None,) * 20, 1, "stale"), {"reason": "failed"}),
            Track(training.LOSS_MEDIAN, (*flat(2, 20), "stale", None, None, 2)),
            Track(training.LOSS_TREND, (*flat(-0.4, 20), "stale", *(None,) * 17, -0.4)),
            Track(training.LOSS_SCALE, (*flat(65536, 20), 512, 64)),
            Track(training.LOSS_SCALE_INITIAL, (128,)),
            Track(training.LOSS_SCALE_CALIBRATED, (*flat(128, 20), "stale", *flat(None, 8), 64)),
            Track(training.LOSS_SCALE_DECREASES, (*flat(0, 20), 7, 10)),
            Track(training.SKIPPED_STEPS, (*flat(0, 20), 7, 10)),
        ),
    ),
    Example(
        title="nothing fires on a run that calibrates its loss scale",
        minutes=40,
        tracks=(
            Track(run.STEP, ramp(1, 60, 41)),
            Track(run.STEPS, ramp(1, 60, 41)),
            Track(training.LOSS_SCALE, (65536, 16384)),
            Track(training.LOSS_SCALE_CALIBRATED, (*flat(None, 8), 16384)),
            Track(training.LOSS_SCALE_DECREASES, (0, 2)),
            Track(training.SKIPPED_STEPS, (0, 2)),
            Track(training.LOSS_MEDIAN, (None, None, 2)),
            Track(training.LOSS_TREND, (*flat(None, 18), -3)),
        ),
    ),
    Example(
        title="only its standing still is reported of a run that hangs",
        minutes=46,
        tracks=(Track(run.STEP, ramp(5000, 60, 10)), Track(run.STEPS, ramp(5000, 60, 10))),
        also={"MpAgentRunStalled": (Severity.CRITICAL, Severity.WARNING)},
    ),
    Example(
        title="only its end is reported of a run whose series are gone",
        minutes=46,
        ends=10,
        also={"MpAgentRunVanished": (Severity.WARNING,)},
    ),
    Example(
        title="nothing fires when a scrape fails",
        minutes=46,
        tracks=(
            Track(run.RUN_ACTIVE, (*flat(1, 20), "stale", 1)),
            Track(training.SKIPPED_STEPS, (*flat(3, 20), "stale", 3)),
            Track(training.LOSS_SPIKE_STEPS, (*flat(0, 20), "stale", 0)),
            Track("up", (*flat(1, 20), 0, 1)),
        ),
    ),
)
