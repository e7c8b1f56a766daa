"""Examples of MpAgentLossScaleFarBelowInitial."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, halving, ramp

_COLLAPSED = Example(
    title="a scale that falls from 65536 to 512 over an afternoon; the alert lasts longer",
    minutes=150,
    tracks=(
        Track(
            metrics.LOSS_SCALE,
            (
                *(65536 * 0.5 ** (minute // 18) for minute in range(132)),
                *flat(512, 10),
                1024,
            ),
        ),
        Track(metrics.LOSS_SCALE_CALIBRATED, (16384,)),
    ),
    fires={
        Severity.CRITICAL: "The loss scale of run demo has fallen to 512, less than "
        "<loss_scale_share_of_initial> of its initial value."
    },
    at=148,
    not_yet=(125,),
    also={"MpAgentLossScaleLow": (Severity.INFO, Severity.WARNING)},
)

_CALIBRATING = Example(
    title="calibration that overshoots to 512 and recovers",
    minutes=30,
    tracks=(
        Track(metrics.LOSS_SCALE, (*halving(65536, 8), *flat(512, 4), 16384)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(None, 20), 16384)),
        Track(metrics.STEP, ramp(1, 25, 31)),
        Track(metrics.STEPS, ramp(1, 25, 31)),
    ),
)

_CALIBRATED_LOW = Example(
    title="calibration that ends at 64: low, but no collapse",
    minutes=45,
    tracks=(
        Track(metrics.LOSS_SCALE, (65536, 64)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(None, 8), 64)),
        Track(metrics.STEP, ramp(1, 60, 46)),
        Track(metrics.STEPS, ramp(1, 60, 46)),
    ),
    also={"MpAgentLossScaleLow": (Severity.INFO, Severity.WARNING)},
)

_AT_THE_BORDER = Example(
    title="one halving of a scale that was just above the limit after calibration",
    minutes=12,
    tracks=(
        Track(metrics.LOSS_SCALE, (1024, 512)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (1024,)),
    ),
    also={"MpAgentLossScaleLow": (Severity.WARNING,)},
)

_FELL_ON = Example(
    title="a scale that falls from 512, where calibration had left it, to 64 within an hour",
    minutes=80,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(512, 20), *flat(256, 20), *flat(128, 20), 64)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (512,)),
    ),
    also={
        "MpAgentLossScaleLow": (Severity.INFO, Severity.WARNING),
        "MpAgentLossScaleLowAndFalling": (Severity.WARNING,),
    },
)

_COLLAPSED_FROM_LOW = Example(
    title="a scale that collapses from 512, where calibration had left it, to 4",
    minutes=40,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(512, 20), *halving(256, 7))),
        Track(metrics.LOSS_SCALE_CALIBRATED, (512,)),
    ),
    fires={
        Severity.CRITICAL: "The loss scale of run demo has fallen to 4, less than "
        "<loss_scale_share_of_initial> of its initial value."
    },
    at=38,
    not_yet=(25,),
    also={
        "MpAgentLossScaleLow": (Severity.INFO, Severity.WARNING),
        "MpAgentLossScaleLowAndFalling": (Severity.WARNING,),
    },
)

_CALIBRATION_AGAIN = Example(
    title="a resumed run that repeats its calibration",
    minutes=25,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(65536, 10), 64)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(65536, 10), "stale", *flat(None, 8), 64)),
        Track(metrics.STEP, (*ramp(5000, 60, 10), *ramp(3000, 60, 16))),
    ),
)

_BRIEF = Example(
    title="a dip of a minute",
    minutes=40,
    tracks=(Track(metrics.LOSS_SCALE, (*flat(65536, 20), 512, 1024)),),
    also={"MpAgentLossScaleLow": (Severity.INFO,)},
)

_HUNG = Example(
    title="a run that hung right after its scale fell",
    minutes=18,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(65536, 10), 512)),
        Track(metrics.STEP, ramp(5000, 60, 11)),
        Track(metrics.STEPS, ramp(5000, 60, 11)),
    ),
)

EXAMPLES = {
    "MpAgentLossScaleFarBelowInitial": Examples(
        firing=(_COLLAPSED, _COLLAPSED_FROM_LOW),
        quiet=(
            _CALIBRATING,
            _CALIBRATED_LOW,
            _FELL_ON,
            _AT_THE_BORDER,
            _CALIBRATION_AGAIN,
            _BRIEF,
            _HUNG,
        ),
    ),
}
