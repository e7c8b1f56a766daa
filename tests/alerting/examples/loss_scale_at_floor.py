"""Examples of MpAgentLossScaleAtFloor."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp

_STUCK = Example(
    title="steps overflow at a scale that stays at 1; the alert lasts longer",
    minutes=20,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(4, 10), *flat(1, 6), 2)),
        Track(metrics.LOSS_SCALE_INITIAL, (16,)),
        Track(metrics.LOSS_SCALE_FLOOR_STALLS, (*flat(0, 11), *ramp(30, 60, 10))),
    ),
    fires={
        Severity.CRITICAL: "The loss scale of run demo is down to 1 and gradients still overflow: "
        "GradScaler skips its steps."
    },
    at=20,
    not_yet=(10,),
)

_STORM = Example(
    title="overflow from the first step on, first scraped when the scale is below 1",
    minutes=6,
    tracks=(
        Track(metrics.LOSS_SCALE, (None, None, 0.25)),
        Track(metrics.LOSS_SCALE_DECREASES, (None, None, 18)),
        Track(metrics.SKIPPED_STEPS, (None, None, 18)),
        Track(metrics.STEP, (None, None, 18)),
        Track(metrics.STEPS, (None, None, 18)),
    ),
    fires={
        Severity.CRITICAL: "The loss scale of run demo is down to 0.25 and gradients still "
        "overflow: GradScaler skips its steps."
    },
    at=2,
    not_yet=(1,),
)

_ONE_DIP = Example(
    title="one dip to 1, where the scale stays for 2000 steps without overflow",
    minutes=40,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(2, 5), *flat(1, 33), 2)),
        Track(metrics.LOSS_SCALE_INITIAL, (16,)),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 5), 1)),
        Track(metrics.SKIPPED_STEPS, (*flat(0, 5), 1)),
    ),
)

_ENDED_AT_FLOOR = Example(
    title="a burst of overflows that has ended, with the scale recovering",
    minutes=20,
    tracks=(
        Track(metrics.LOSS_SCALE, (4,)),
        Track(metrics.LOSS_SCALE_INITIAL, (16,)),
        Track(metrics.LOSS_SCALE_FLOOR_STALLS, (*flat(0, 10), 1, 2, 3, 4)),
    ),
)

_NO_SCALER = Example(
    title="a run without a scaler",
    minutes=10,
    without=(metrics.LOSS_SCALE, metrics.LOSS_SCALE_INITIAL),
)

EXAMPLES = {
    "MpAgentLossScaleAtFloor": Examples(
        firing=(_STUCK, _STORM),
        quiet=(_ONE_DIP, _ENDED_AT_FLOOR, _NO_SCALER),
    ),
}
