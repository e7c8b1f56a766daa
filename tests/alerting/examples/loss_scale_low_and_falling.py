"""Examples of MpAgentLossScaleLowAndFalling."""

from mp_agent.alerting.conditions.loss_scale import _DESCRIPTION
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, halving, ramp


def _fires(scale: int) -> str:
    return _DESCRIPTION.replace("{run}", "demo").replace("{value|number}", str(scale))


_SLOWLY = Example(
    title="a run calibrated to 512 whose scale is halved every twenty minutes",
    minutes=66,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(512, 20), *flat(256, 20), *flat(128, 20), 64)),
        Track(metrics.LOSS_SCALE_INITIAL, (512,)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (512,)),
    ),
    fires={Severity.WARNING: _fires(64)},
    at=64,
    not_yet=(59, 61),
)

_AT_ONCE = Example(
    title="three decreases within minutes, to a quarter of the calibrated value",
    minutes=28,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(512, 20), 256, 128, 64)),
        Track(metrics.LOSS_SCALE_INITIAL, (512,)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (256,)),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 20), 1, 2, 3)),
    ),
    fires={Severity.WARNING: _fires(64)},
    at=25,
    not_yet=(22,),
)

_SETTLED = Example(
    title="a scale that fell before the recorded history, and has stayed at 64 for days",
    minutes=15,
    tracks=(
        Track(metrics.LOSS_SCALE, (64,)),
        Track(metrics.LOSS_SCALE_INITIAL, (512,)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (512,)),
    ),
)

_CALIBRATED_LOW = Example(
    title="a scale of 64 after calibration from 512",
    minutes=15,
    tracks=(
        Track(metrics.LOSS_SCALE, (512, 64)),
        Track(metrics.LOSS_SCALE_INITIAL, (512,)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (64,)),
    ),
)

_COLLAPSE = Example(
    title="the scale collapses long after calibration; the alert lasts longer",
    minutes=40,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(65536, 20), *halving(32768, 14), 512)),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 20), *ramp(1, 1, 14))),
        Track(metrics.SKIPPED_STEPS, (*flat(0, 20), *ramp(1, 1, 14))),
    ),
    fires={Severity.WARNING: _fires(4)},
    at=40,
    not_yet=(28, 30),
    also={
        "MpAgentLossScaleFarBelowInitial": (Severity.CRITICAL,),
        "MpAgentLossScaleLow": (Severity.INFO, Severity.WARNING),
        "MpAgentOverflowRatioHigh": (Severity.WARNING,),
    },
)

_STAYS_LOW = {"MpAgentLossScaleLow": (Severity.INFO, Severity.WARNING)}

_SAWTOOTH = Example(
    title="a sawtooth between 64 and 128",
    minutes=30,
    tracks=(
        Track(metrics.LOSS_SCALE, (64, 64, 128, 64) * 7),
        Track(metrics.LOSS_SCALE_INITIAL, (128,)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (128,)),
        Track(metrics.LOSS_SCALE_INCREASES, tuple((minute + 2) // 4 for minute in range(31))),
        Track(metrics.LOSS_SCALE_DECREASES, tuple((minute + 1) // 4 for minute in range(31))),
    ),
)

_CALIBRATION = Example(
    title="calibration from 65536 to 64",
    minutes=40,
    tracks=(
        Track(metrics.LOSS_SCALE, (65536, 64)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(None, 9), 64)),
        Track(metrics.LOSS_SCALE_DECREASES, (0, 10)),
        Track(metrics.SKIPPED_STEPS, (0, 10)),
        Track(metrics.STEP, ramp(1, 60, 41)),
        Track(metrics.STEPS, ramp(1, 60, 41)),
    ),
    also=_STAYS_LOW,
)

_CALIBRATION_ELSEWHERE = Example(
    title="calibration after a resume at step 90 000 under a new node agent",
    minutes=40,
    tracks=(
        Track(metrics.LOSS_SCALE, (65536, 64)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(None, 9), 64)),
        Track(metrics.LOSS_SCALE_DECREASES, (0, 10)),
        Track(metrics.SKIPPED_STEPS, (0, 10)),
        Track(metrics.STEP, ramp(90_000, 60, 41)),
        Track(metrics.STEPS, ramp(1, 60, 41)),
    ),
    also=_STAYS_LOW,
)

_SLOW_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt, which counts its steps from 1 and makes few of them",
    minutes=50,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(65536, 42), *halving(1024, 5))),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(65536, 10), "stale")),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 42), *ramp(6, 1, 5))),
        Track(metrics.STEP, (*ramp(5000, 60, 10), *ramp(1, 10, 41))),
    ),
)

_CALIBRATION_AGAIN = Example(
    title="calibration after a resume at an earlier step under the same node agent",
    minutes=25,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(65536, 10), 64)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(65536, 10), "stale", *flat(None, 8), 64)),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 10), 10)),
        Track(metrics.STEP, (*ramp(5000, 60, 10), *ramp(3000, 60, 16))),
    ),
)

_HUNG = Example(
    title="a run that hung while the scale was falling",
    minutes=9,
    tracks=(
        Track(metrics.LOSS_SCALE, (256, 256, 256, 16)),
        Track(metrics.LOSS_SCALE_INITIAL, (512,)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (512,)),
        Track(metrics.LOSS_SCALE_DECREASES, (1, 1, 1, 5)),
        Track(metrics.STEP, ramp(5000, 60, 4)),
        Track(metrics.STEPS, ramp(5000, 60, 4)),
    ),
)

_LOW_ON_PURPOSE = Example(
    title="a run that starts below the limit on purpose",
    minutes=30,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(64, 20), *halving(32, 4))),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 20), *ramp(1, 1, 4))),
        Track(metrics.LOSS_SCALE_INITIAL, (64,)),
    ),
)

EXAMPLES = {
    "MpAgentLossScaleLowAndFalling": Examples(
        firing=(_COLLAPSE, _SLOWLY, _AT_ONCE),
        quiet=(
            _SAWTOOTH,
            _CALIBRATION,
            _CALIBRATION_ELSEWHERE,
            _CALIBRATION_AGAIN,
            _SLOW_CALIBRATION_AGAIN,
            _HUNG,
            _SETTLED,
            _CALIBRATED_LOW,
            _LOW_ON_PURPOSE,
        ),
    ),
}
