"""Examples of MpAgentLossScaleLow."""

from mp_agent.alerting.conditions.loss_scale import (
    _REDUCED,
    _REDUCED_HOLD,
    _VERY_LOW,
    _VERY_LOW_HOLD,
    _description,
)
from mp_agent.alerting.durations import Duration
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.terms import Limit
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp
from tests.alerting.examples.loss_scale import counted_anew, resumed_elsewhere


def _fires(bound: Limit, hold: Duration, scale: str) -> str:
    text = _description(bound, hold)
    return text.replace("{run}", "demo").replace("{value|number}", scale)


_BOTH = Example(
    title="a scale that settles at 512; the alert lasts beyond the next increase",
    minutes=55,
    tracks=(Track(metrics.LOSS_SCALE, (*flat(8192, 20), *flat(512, 30), 65536)),),
    fires={
        Severity.WARNING: _fires(_VERY_LOW, _VERY_LOW_HOLD, "512"),
        Severity.INFO: _fires(_REDUCED, _REDUCED_HOLD, "512"),
    },
    at=54,
    not_yet=(13,),
    also={"MpAgentLossScaleFarBelowInitial": (Severity.CRITICAL,)},
)

_REDUCED_ONLY = Example(
    title="a scale of 8192 for a long time",
    minutes=35,
    tracks=(Track(metrics.LOSS_SCALE, (*flat(65536, 10), 8192)),),
    fires={Severity.INFO: _fires(_REDUCED, _REDUCED_HOLD, "8192")},
    at=30,
    not_yet=(24,),
)

_PASSING = Example(
    title="dips below both limits for a few minutes",
    minutes=50,
    tracks=(Track(metrics.LOSS_SCALE, (*flat(65536, 10), *flat(8192, 13), *flat(65536, 12),
                                       *flat(1000, 8), 65536)),),
)  # fmt: skip

_ON_PURPOSE = Example(
    title="an initial scale of 4096 that stays",
    minutes=25,
    tracks=(
        Track(metrics.LOSS_SCALE, (4096,)),
        Track(metrics.LOSS_SCALE_INITIAL, (4096,)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (4096,)),
    ),
)

_LOWER_ON_PURPOSE = Example(
    title="an initial scale of 512 that stays",
    minutes=25,
    tracks=(
        Track(metrics.LOSS_SCALE, (512,)),
        Track(metrics.LOSS_SCALE_INITIAL, (512,)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (512,)),
    ),
)

_CALIBRATION = Example(
    title="a long calibration of slow steps that ends high",
    minutes=60,
    tracks=(
        Track(metrics.LOSS_SCALE, (65536, *flat(512, 45), 32768)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(None, 50), 32768)),
        Track(metrics.STEP, ramp(1, 6, 61)),
        Track(metrics.STEPS, ramp(1, 6, 61)),
    ),
)

_CALIBRATION_AGAIN = Example(
    title="calibration after a resume at an earlier step under the same node agent",
    minutes=48,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(65536, 20), *flat(512, 25), 32768)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(65536, 20), "stale", *flat(None, 25), 32768)),
        Track(metrics.STEP, (*ramp(5000, 60, 20), *ramp(4000, 60, 29))),
    ),
)

_CALIBRATION_ELSEWHERE = Example(
    title="calibration after a resume at step 90 000 under a new node agent",
    minutes=35,
    tracks=(
        Track(metrics.LOSS_SCALE, (65536, 512)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (None,)),
        *resumed_elsewhere(6, 36),
    ),
)

_SLOW_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt, which counts its steps from 1 and makes few of them",
    minutes=65,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(65536, 42), 512)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(65536, 10), "stale")),
        *counted_anew(6, 66),
    ),
)

_HUNG = Example(
    title="a run that hung with a low scale",
    minutes=29,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(65536, 8), 1000)),
        Track(metrics.STEP, ramp(5000, 60, 10)),
        Track(metrics.STEPS, ramp(5000, 60, 10)),
    ),
    also={"MpAgentRunStalled": (Severity.WARNING,)},
)

EXAMPLES = {
    "MpAgentLossScaleLow": Examples(
        firing=(_BOTH, _REDUCED_ONLY),
        quiet=(
            _PASSING,
            _ON_PURPOSE,
            _LOWER_ON_PURPOSE,
            _CALIBRATION,
            _CALIBRATION_AGAIN,
            _CALIBRATION_ELSEWHERE,
            _SLOW_CALIBRATION_AGAIN,
            _HUNG,
        ),
    ),
}
