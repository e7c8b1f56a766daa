"""Examples of MpAgentLossScaleConsecutiveDecreases."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, halving, ramp
from tests.alerting.examples.loss_scale import counted_anew, resumed_elsewhere


def _falls(
    minute: int, times: int, *, every: int = 1, until: int = 50, grows: bool = False
) -> tuple[Track, ...]:
    """Return a scale that is halved so often from a minute on; grows: once more upwards then."""
    count = tuple(float(min(max(m - minute + every, 0) // every, times)) for m in range(until + 1))
    end = minute + every * times
    in_row = tuple(0.0 if grows and m >= end else c for m, c in enumerate(count))
    risen = tuple(float(grows and m >= end) for m in range(until + 1))
    scale = (65536 * 0.5 ** (c - r) for c, r in zip(count, risen, strict=True))
    return (
        Track(metrics.LOSS_SCALE, tuple(scale)),
        Track(metrics.LOSS_SCALE_DECREASES, count),
        Track(metrics.LOSS_SCALE_INCREASES, risen),
        Track(metrics.LOSS_SCALE_CONSECUTIVE_DECREASES, in_row),
    )


_FIVE = Example(
    title="five decreases, one per minute, and no increase",
    minutes=50,
    tracks=_falls(20, 5),
    fires={
        Severity.WARNING: "The loss scale of run demo was lowered 5 consecutive times in the "
        "last <loss_scale_window>."
    },
    at=36,
    not_yet=(23, 50),
    also={"MpAgentLossScaleLow": (Severity.INFO,)},
)

_FOUR_AND_UP = Example(
    title="four decreases, then one growth",
    minutes=50,
    tracks=_falls(20, 4, grows=True),
    also={"MpAgentLossScaleLow": (Severity.INFO,)},
)

_FAR_APART = Example(
    title="five decreases over an hour and a half",
    minutes=100,
    tracks=_falls(20, 5, every=18, until=100),
    also={"MpAgentLossScaleLow": (Severity.INFO,)},
)

_CALIBRATION = Example(
    title="calibration from 65536 to 1024",
    minutes=25,
    tracks=(
        Track(metrics.LOSS_SCALE, (*halving(65536, 7), 16384)),
        Track(metrics.LOSS_SCALE_CALIBRATED, (*flat(None, 8), 16384)),
        Track(metrics.LOSS_SCALE_DECREASES, (*ramp(0, 1, 7), 6)),
        Track(metrics.LOSS_SCALE_CONSECUTIVE_DECREASES, (*ramp(0, 1, 7), 0)),
        Track(metrics.LOSS_SCALE_INCREASES, (*flat(0, 7), 4)),
        Track(metrics.STEP, ramp(1, 60, 26)),
        Track(metrics.STEPS, ramp(1, 60, 26)),
    ),
)

_UP_AND_DOWN = Example(
    title="a scale of short growth intervals that goes up and down every minute",
    minutes=30,
    tracks=(
        Track(metrics.LOSS_SCALE, (65536, 32768) * 15),
        Track(metrics.LOSS_SCALE_DECREASES, tuple((minute + 1) // 2 for minute in range(31))),
        Track(metrics.LOSS_SCALE_INCREASES, tuple(minute // 2 for minute in range(31))),
        Track(metrics.LOSS_SCALE_CONSECUTIVE_DECREASES, (0, 1) * 15),
    ),
)

_FALLS_OF_NEW_SCALER = (
    Track(metrics.LOSS_SCALE, (*flat(65536, 45), *halving(32768, 7), 16384)),
    Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 45), *ramp(1, 1, 7))),
    Track(metrics.LOSS_SCALE_CONSECUTIVE_DECREASES, (*flat(0, 45), *ramp(1, 1, 7), 0)),
)

_CALIBRATION_ELSEWHERE = Example(
    title="calibration after a resume at step 90 000 under a new node agent",
    minutes=60,
    tracks=(*_FALLS_OF_NEW_SCALER, *resumed_elsewhere(6, 61)),
)

_SLOW_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt, which counts its steps from 1 and makes few of them",
    minutes=60,
    tracks=(*_FALLS_OF_NEW_SCALER, *counted_anew(6, 61)),
)

_CALIBRATION_AGAIN = Example(
    title="calibration after a resume at an earlier step under the same node agent",
    minutes=45,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(65536, 30), *halving(32768, 7), 16384)),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 30), *ramp(1, 1, 7))),
        Track(metrics.LOSS_SCALE_CONSECUTIVE_DECREASES, (*flat(0, 30), *ramp(1, 1, 7), 0)),
        Track(metrics.STEP, (*ramp(5000, 60, 30), *ramp(4000, 60, 16))),
    ),
)

_HUNG = Example(
    title="a run that hung while the scale was falling",
    minutes=18,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(65536, 10), 2048)),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 12), 5)),
        Track(metrics.LOSS_SCALE_CONSECUTIVE_DECREASES, (*flat(0, 12), 5)),
        Track(metrics.STEP, ramp(5000, 60, 10)),
        Track(metrics.STEPS, ramp(5000, 60, 10)),
    ),
)

EXAMPLES = {
    "MpAgentLossScaleConsecutiveDecreases": Examples(
        firing=(_FIVE,),
        quiet=(
            _FOUR_AND_UP,
            _FAR_APART,
            _UP_AND_DOWN,
            _CALIBRATION,
            _CALIBRATION_AGAIN,
            _CALIBRATION_ELSEWHERE,
            _SLOW_CALIBRATION_AGAIN,
            _HUNG,
        ),
    ),
}
