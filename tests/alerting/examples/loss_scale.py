"""Examples of alerts on the loss scale: low, falling, at its floor."""

from mp_agent.alerting.conditions.loss_scale import (
    _DESCRIPTION,
    _REDUCED,
    _REDUCED_HOLD,
    _VERY_LOW,
    _VERY_LOW_HOLD,
    _description,
)
from mp_agent.alerting.durations import Duration
from mp_agent.alerting.expressions.terms import Limit
from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metrics import run, training
from tests.alerting.examples.example import Example, Examples, Track, flat, halving, ramp


def resumed_elsewhere(steps_per_minute: float, samples: int) -> tuple[Track, ...]:
    """Return, for examples, the steps of a run resumed at step 90 000 under a new node agent."""
    return (
        Track(run.STEP, ramp(90_000, steps_per_minute, samples)),
        Track(run.STEPS, ramp(1, steps_per_minute, samples)),
    )


def restarted_count(steps_per_minute: float, samples: int) -> tuple[Track, ...]:
    """Return, for examples, the step of a run that restarts its count in minute 10."""
    return (Track(run.STEP, (*ramp(5000, 60, 10), *ramp(1, steps_per_minute, samples - 10))),)


def _loss_scale_low_and_falling_fires(scale: int) -> str:
    return _DESCRIPTION.replace("{run}", "demo").replace("{value|number}", str(scale))


_SLOWLY = Example(
    title="a run calibrated to 512 whose scale is halved every twenty minutes",
    minutes=66,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(512, 20), *flat(256, 20), *flat(128, 20), 64)),
        Track(training.LOSS_SCALE_INITIAL, (512,)),
        Track(training.LOSS_SCALE_CALIBRATED, (512,)),
    ),
    fires={Severity.WARNING: _loss_scale_low_and_falling_fires(64)},
    at=64,
    not_yet=(59, 61),
)

_AT_ONCE = Example(
    title="three decreases within minutes, to a quarter of the calibrated value",
    minutes=28,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(512, 20), 256, 128, 64)),
        Track(training.LOSS_SCALE_INITIAL, (512,)),
        Track(training.LOSS_SCALE_CALIBRATED, (256,)),
        Track(training.LOSS_SCALE_DECREASES, (*flat(0, 20), 1, 2, 3)),
    ),
    fires={Severity.WARNING: _loss_scale_low_and_falling_fires(64)},
    at=25,
    not_yet=(22,),
)

_SETTLED = Example(
    title="a scale that fell before the recorded history, and has stayed at 64 for days",
    minutes=15,
    tracks=(
        Track(training.LOSS_SCALE, (64,)),
        Track(training.LOSS_SCALE_INITIAL, (512,)),
        Track(training.LOSS_SCALE_CALIBRATED, (512,)),
    ),
)

_LOSS_SCALE_LOW_AND_FALLING_CALIBRATED_LOW = Example(
    title="a scale of 64 after calibration from 512",
    minutes=15,
    tracks=(
        Track(training.LOSS_SCALE, (512, 64)),
        Track(training.LOSS_SCALE_INITIAL, (512,)),
        Track(training.LOSS_SCALE_CALIBRATED, (64,)),
    ),
)

_COLLAPSE = Example(
    title="the scale collapses long after calibration; the alert lasts longer",
    minutes=40,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(65536, 20), *halving(32768, 14), 512)),
        Track(training.LOSS_SCALE_DECREASES, (*flat(0, 20), *ramp(1, 1, 14))),
        Track(training.SKIPPED_STEPS, (*flat(0, 20), *ramp(1, 1, 14))),
    ),
    fires={Severity.WARNING: _loss_scale_low_and_falling_fires(4)},
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
        Track(training.LOSS_SCALE, (64, 64, 128, 64) * 7),
        Track(training.LOSS_SCALE_INITIAL, (128,)),
        Track(training.LOSS_SCALE_CALIBRATED, (128,)),
        Track(training.LOSS_SCALE_INCREASES, tuple((minute + 2) // 4 for minute in range(31))),
        Track(training.LOSS_SCALE_DECREASES, tuple((minute + 1) // 4 for minute in range(31))),
    ),
)

_LOSS_SCALE_LOW_AND_FALLING_CALIBRATION = Example(
    title="calibration from 65536 to 64",
    minutes=40,
    tracks=(
        Track(training.LOSS_SCALE, (65536, 64)),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(None, 9), 64)),
        Track(training.LOSS_SCALE_DECREASES, (0, 10)),
        Track(training.SKIPPED_STEPS, (0, 10)),
        Track(run.STEP, ramp(1, 60, 41)),
        Track(run.STEPS, ramp(1, 60, 41)),
    ),
    also=_STAYS_LOW,
)

_LOSS_SCALE_LOW_AND_FALLING_CALIBRATION_ELSEWHERE = Example(
    title="calibration after a resume at step 90 000 under a new node agent",
    minutes=40,
    tracks=(
        Track(training.LOSS_SCALE, (65536, 64)),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(None, 9), 64)),
        Track(training.LOSS_SCALE_DECREASES, (0, 10)),
        Track(training.SKIPPED_STEPS, (0, 10)),
        Track(run.STEP, ramp(90_000, 60, 41)),
        Track(run.STEPS, ramp(1, 60, 41)),
    ),
    also=_STAYS_LOW,
)

_LOSS_SCALE_LOW_AND_FALLING_SLOW_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt, which counts its steps from 1 and makes few of them",
    minutes=50,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(65536, 42), *halving(1024, 5))),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(65536, 10), "stale")),
        Track(training.LOSS_SCALE_DECREASES, (*flat(0, 42), *ramp(6, 1, 5))),
        Track(run.STEP, (*ramp(5000, 60, 10), *ramp(1, 10, 41))),
    ),
)

_LOSS_SCALE_LOW_AND_FALLING_CALIBRATION_AGAIN = Example(
    title="calibration after a resume at an earlier step under the same node agent",
    minutes=25,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(65536, 10), 64)),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(65536, 10), "stale", *flat(None, 8), 64)),
        Track(training.LOSS_SCALE_DECREASES, (*flat(0, 10), 10)),
        Track(run.STEP, (*ramp(5000, 60, 10), *ramp(3000, 60, 16))),
    ),
)

_LOSS_SCALE_LOW_AND_FALLING_HUNG = Example(
    title="a run that hung while the scale was falling",
    minutes=9,
    tracks=(
        Track(training.LOSS_SCALE, (256, 256, 256, 16)),
        Track(training.LOSS_SCALE_INITIAL, (512,)),
        Track(training.LOSS_SCALE_CALIBRATED, (512,)),
        Track(training.LOSS_SCALE_DECREASES, (1, 1, 1, 5)),
        Track(run.STEP, ramp(5000, 60, 4)),
        Track(run.STEPS, ramp(5000, 60, 4)),
    ),
)

_LOW_ON_PURPOSE = Example(
    title="a run that starts below the limit on purpose",
    minutes=30,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(64, 20), *halving(32, 4))),
        Track(training.LOSS_SCALE_DECREASES, (*flat(0, 20), *ramp(1, 1, 4))),
        Track(training.LOSS_SCALE_INITIAL, (64,)),
    ),
)


_STUCK = Example(
    title="steps overflow at a scale that stays at 1; the alert lasts longer",
    minutes=20,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(4, 10), *flat(1, 6), 2)),
        Track(training.LOSS_SCALE_INITIAL, (16,)),
        Track(training.LOSS_SCALE_FLOOR_STALLS, (*flat(0, 11), *ramp(30, 60, 10))),
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
        Track(training.LOSS_SCALE, (None, None, 0.25)),
        Track(training.LOSS_SCALE_DECREASES, (None, None, 18)),
        Track(training.SKIPPED_STEPS, (None, None, 18)),
        Track(run.STEP, (None, None, 18)),
        Track(run.STEPS, (None, None, 18)),
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
        Track(training.LOSS_SCALE, (*flat(2, 5), *flat(1, 33), 2)),
        Track(training.LOSS_SCALE_INITIAL, (16,)),
        Track(training.LOSS_SCALE_DECREASES, (*flat(0, 5), 1)),
        Track(training.SKIPPED_STEPS, (*flat(0, 5), 1)),
    ),
)

_ENDED_AT_FLOOR = Example(
    title="a burst of overflows that has ended, with the scale recovering",
    minutes=20,
    tracks=(
        Track(training.LOSS_SCALE, (4,)),
        Track(training.LOSS_SCALE_INITIAL, (16,)),
        Track(training.LOSS_SCALE_FLOOR_STALLS, (*flat(0, 10), 1, 2, 3, 4)),
    ),
)

_NO_SCALER = Example(
    title="a run without a scaler",
    minutes=10,
    without=(training.LOSS_SCALE, training.LOSS_SCALE_INITIAL),
)


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
        Track(training.LOSS_SCALE, tuple(scale)),
        Track(training.LOSS_SCALE_DECREASES, count),
        Track(training.LOSS_SCALE_INCREASES, risen),
        Track(training.LOSS_SCALE_CONSECUTIVE_DECREASES, in_row),
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

_LOSS_SCALE_CONSECUTIVE_DECREASES_CALIBRATION = Example(
    title="calibration from 65536 to 1024",
    minutes=25,
    tracks=(
        Track(training.LOSS_SCALE, (*halving(65536, 7), 16384)),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(None, 8), 16384)),
        Track(training.LOSS_SCALE_DECREASES, (*ramp(0, 1, 7), 6)),
        Track(training.LOSS_SCALE_CONSECUTIVE_DECREASES, (*ramp(0, 1, 7), 0)),
        Track(training.LOSS_SCALE_INCREASES, (*flat(0, 7), 4)),
        Track(run.STEP, ramp(1, 60, 26)),
        Track(run.STEPS, ramp(1, 60, 26)),
    ),
)

_UP_AND_DOWN = Example(
    title="a scale of short growth intervals that goes up and down every minute",
    minutes=30,
    tracks=(
        Track(training.LOSS_SCALE, (65536, 32768) * 15),
        Track(training.LOSS_SCALE_DECREASES, tuple((minute + 1) // 2 for minute in range(31))),
        Track(training.LOSS_SCALE_INCREASES, tuple(minute // 2 for minute in range(31))),
        Track(training.LOSS_SCALE_CONSECUTIVE_DECREASES, (0, 1) * 15),
    ),
)

_FALLS_OF_NEW_SCALER = (
    Track(training.LOSS_SCALE, (*flat(65536, 45), *halving(32768, 7), 16384)),
    Track(training.LOSS_SCALE_DECREASES, (*flat(0, 45), *ramp(1, 1, 7))),
    Track(training.LOSS_SCALE_CONSECUTIVE_DECREASES, (*flat(0, 45), *ramp(1, 1, 7), 0)),
)

_LOSS_SCALE_CONSECUTIVE_DECREASES_CALIBRATION_ELSEWHERE = Example(
    title="calibration after a resume at step 90 000 under a new node agent",
    minutes=60,
    tracks=(*_FALLS_OF_NEW_SCALER, *resumed_elsewhere(6, 61)),
)

_LOSS_SCALE_CONSECUTIVE_DECREASES_SLOW_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt, which counts its steps from 1 and makes few of them",
    minutes=60,
    tracks=(*_FALLS_OF_NEW_SCALER, *restarted_count(6, 61)),
)

_LOSS_SCALE_CONSECUTIVE_DECREASES_CALIBRATION_AGAIN = Example(
    title="calibration after a resume at an earlier step under the same node agent",
    minutes=45,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(65536, 30), *halving(32768, 7), 16384)),
        Track(training.LOSS_SCALE_DECREASES, (*flat(0, 30), *ramp(1, 1, 7))),
        Track(training.LOSS_SCALE_CONSECUTIVE_DECREASES, (*flat(0, 30), *ramp(1, 1, 7), 0)),
        Track(run.STEP, (*ramp(5000, 60, 30), *ramp(4000, 60, 16))),
    ),
)

_LOSS_SCALE_CONSECUTIVE_DECREASES_HUNG = Example(
    title="a run that hung while the scale was falling",
    minutes=18,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(65536, 10), 2048)),
        Track(training.LOSS_SCALE_DECREASES, (*flat(0, 12), 5)),
        Track(training.LOSS_SCALE_CONSECUTIVE_DECREASES, (*flat(0, 12), 5)),
        Track(run.STEP, ramp(5000, 60, 10)),
        Track(run.STEPS, ramp(5000, 60, 10)),
    ),
)


_COLLAPSED = Example(
    title="a scale that falls from 65536 to 512 over an afternoon; the alert lasts longer",
    minutes=150,
    tracks=(
        Track(
            training.LOSS_SCALE,
            (
                *(65536 * 0.5 ** (minute // 18) for minute in range(132)),
                *flat(512, 10),
                1024,
            ),
        ),
        Track(training.LOSS_SCALE_CALIBRATED, (16384,)),
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
        Track(training.LOSS_SCALE, (*halving(65536, 8), *flat(512, 4), 16384)),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(None, 20), 16384)),
        Track(run.STEP, ramp(1, 25, 31)),
        Track(run.STEPS, ramp(1, 25, 31)),
    ),
)

_LOSS_SCALE_FAR_BELOW_INITIAL_CALIBRATED_LOW = Example(
    title="calibration that ends at 64: low, but no collapse",
    minutes=45,
    tracks=(
        Track(training.LOSS_SCALE, (65536, 64)),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(None, 8), 64)),
        Track(run.STEP, ramp(1, 60, 46)),
        Track(run.STEPS, ramp(1, 60, 46)),
    ),
    also={"MpAgentLossScaleLow": (Severity.INFO, Severity.WARNING)},
)

_AT_THE_BORDER = Example(
    title="one halving of a scale that was just above the limit after calibration",
    minutes=12,
    tracks=(
        Track(training.LOSS_SCALE, (1024, 512)),
        Track(training.LOSS_SCALE_CALIBRATED, (1024,)),
    ),
    also={"MpAgentLossScaleLow": (Severity.WARNING,)},
)

_FELL_ON = Example(
    title="a scale that falls from 512, where calibration had left it, to 64 within an hour",
    minutes=80,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(512, 20), *flat(256, 20), *flat(128, 20), 64)),
        Track(training.LOSS_SCALE_CALIBRATED, (512,)),
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
        Track(training.LOSS_SCALE, (*flat(512, 20), *halving(256, 7))),
        Track(training.LOSS_SCALE_CALIBRATED, (512,)),
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

_LOSS_SCALE_FAR_BELOW_INITIAL_CALIBRATION_AGAIN = Example(
    title="a resumed run that repeats its calibration",
    minutes=25,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(65536, 10), 64)),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(65536, 10), "stale", *flat(None, 8), 64)),
        Track(run.STEP, (*ramp(5000, 60, 10), *ramp(3000, 60, 16))),
    ),
)

_BRIEF = Example(
    title="a dip of a minute",
    minutes=40,
    tracks=(Track(training.LOSS_SCALE, (*flat(65536, 20), 512, 1024)),),
    also={"MpAgentLossScaleLow": (Severity.INFO,)},
)

_LOSS_SCALE_FAR_BELOW_INITIAL_HUNG = Example(
    title="a run that hung right after its scale fell",
    minutes=18,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(65536, 10), 512)),
        Track(run.STEP, ramp(5000, 60, 11)),
        Track(run.STEPS, ramp(5000, 60, 11)),
    ),
)


def _loss_scale_low_fires(bound: Limit, hold: Duration, scale: str) -> str:
    text = _description(bound, hold)
    return text.replace("{run}", "demo").replace("{value|number}", scale)


_BOTH = Example(
    title="a scale that settles at 512; the alert lasts beyond the next increase",
    minutes=55,
    tracks=(Track(training.LOSS_SCALE, (*flat(8192, 20), *flat(512, 30), 65536)),),
    fires={
        Severity.WARNING: _loss_scale_low_fires(_VERY_LOW, _VERY_LOW_HOLD, "512"),
        Severity.INFO: _loss_scale_low_fires(_REDUCED, _REDUCED_HOLD, "512"),
    },
    at=54,
    not_yet=(13,),
    also={"MpAgentLossScaleFarBelowInitial": (Severity.CRITICAL,)},
)

_REDUCED_ONLY = Example(
    title="a scale of 8192 for a long time",
    minutes=35,
    tracks=(Track(training.LOSS_SCALE, (*flat(65536, 10), 8192)),),
    fires={Severity.INFO: _loss_scale_low_fires(_REDUCED, _REDUCED_HOLD, "8192")},
    at=30,
    not_yet=(24,),
)

_PASSING = Example(
    title="dips below both limits for a few minutes",
    minutes=50,
    tracks=(Track(training.LOSS_SCALE, (*flat(65536, 10), *flat(8192, 13), *flat(65536, 12),
                                       *flat(1000, 8), 65536)),),
)  # fmt: skip

_ON_PURPOSE = Example(
    title="an initial scale of 4096 that stays",
    minutes=25,
    tracks=(
        Track(training.LOSS_SCALE, (4096,)),
        Track(training.LOSS_SCALE_INITIAL, (4096,)),
        Track(training.LOSS_SCALE_CALIBRATED, (4096,)),
    ),
)

_LOWER_ON_PURPOSE = Example(
    title="an initial scale of 512 that stays",
    minutes=25,
    tracks=(
        Track(training.LOSS_SCALE, (512,)),
        Track(training.LOSS_SCALE_INITIAL, (512,)),
        Track(training.LOSS_SCALE_CALIBRATED, (512,)),
    ),
)

_LOSS_SCALE_LOW_CALIBRATION = Example(
    title="a long calibration of slow steps that ends high",
    minutes=60,
    tracks=(
        Track(training.LOSS_SCALE, (65536, *flat(512, 45), 32768)),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(None, 50), 32768)),
        Track(run.STEP, ramp(1, 6, 61)),
        Track(run.STEPS, ramp(1, 6, 61)),
    ),
)

_LOSS_SCALE_LOW_CALIBRATION_AGAIN = Example(
    title="calibration after a resume at an earlier step under the same node agent",
    minutes=48,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(65536, 20), *flat(512, 25), 32768)),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(65536, 20), "stale", *flat(None, 25), 32768)),
        Track(run.STEP, (*ramp(5000, 60, 20), *ramp(4000, 60, 29))),
    ),
)

_LOSS_SCALE_LOW_CALIBRATION_ELSEWHERE = Example(
    title="calibration after a resume at step 90 000 under a new node agent",
    minutes=35,
    tracks=(
        Track(training.LOSS_SCALE, (65536, 512)),
        Track(training.LOSS_SCALE_CALIBRATED, (None,)),
        *resumed_elsewhere(6, 36),
    ),
)

_LOSS_SCALE_LOW_SLOW_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt, which counts its steps from 1 and makes few of them",
    minutes=65,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(65536, 42), 512)),
        Track(training.LOSS_SCALE_CALIBRATED, (*flat(65536, 10), "stale")),
        *restarted_count(6, 66),
    ),
)

_LOSS_SCALE_LOW_HUNG = Example(
    title="a run that hung with a low scale",
    minutes=29,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(65536, 8), 1000)),
        Track(run.STEP, ramp(5000, 60, 10)),
        Track(run.STEPS, ramp(5000, 60, 10)),
    ),
    also={"MpAgentRunStalled": (Severity.WARNING,)},
)


EXAMPLES = {
    "MpAgentLossScaleLowAndFalling": Examples(
        firing=(_COLLAPSE, _SLOWLY, _AT_ONCE),
        quiet=(
            _SAWTOOTH,
            _LOSS_SCALE_LOW_AND_FALLING_CALIBRATION,
            _LOSS_SCALE_LOW_AND_FALLING_CALIBRATION_ELSEWHERE,
            _LOSS_SCALE_LOW_AND_FALLING_CALIBRATION_AGAIN,
            _LOSS_SCALE_LOW_AND_FALLING_SLOW_CALIBRATION_AGAIN,
            _LOSS_SCALE_LOW_AND_FALLING_HUNG,
            _SETTLED,
            _LOSS_SCALE_LOW_AND_FALLING_CALIBRATED_LOW,
            _LOW_ON_PURPOSE,
        ),
    ),
    "MpAgentLossScaleAtFloor": Examples(
        firing=(_STUCK, _STORM),
        quiet=(_ONE_DIP, _ENDED_AT_FLOOR, _NO_SCALER),
    ),
    "MpAgentLossScaleConsecutiveDecreases": Examples(
        firing=(_FIVE,),
        quiet=(
            _FOUR_AND_UP,
            _FAR_APART,
            _UP_AND_DOWN,
            _LOSS_SCALE_CONSECUTIVE_DECREASES_CALIBRATION,
            _LOSS_SCALE_CONSECUTIVE_DECREASES_CALIBRATION_AGAIN,
            _LOSS_SCALE_CONSECUTIVE_DECREASES_CALIBRATION_ELSEWHERE,
            _LOSS_SCALE_CONSECUTIVE_DECREASES_SLOW_CALIBRATION_AGAIN,
            _LOSS_SCALE_CONSECUTIVE_DECREASES_HUNG,
        ),
    ),
    "MpAgentLossScaleFarBelowInitial": Examples(
        firing=(_COLLAPSED, _COLLAPSED_FROM_LOW),
        quiet=(
            _CALIBRATING,
            _LOSS_SCALE_FAR_BELOW_INITIAL_CALIBRATED_LOW,
            _FELL_ON,
            _AT_THE_BORDER,
            _LOSS_SCALE_FAR_BELOW_INITIAL_CALIBRATION_AGAIN,
            _BRIEF,
            _LOSS_SCALE_FAR_BELOW_INITIAL_HUNG,
        ),
    ),
    "MpAgentLossScaleLow": Examples(
        firing=(_BOTH, _REDUCED_ONLY),
        quiet=(
            _PASSING,
            _ON_PURPOSE,
            _LOWER_ON_PURPOSE,
            _LOSS_SCALE_LOW_CALIBRATION,
            _LOSS_SCALE_LOW_CALIBRATION_AGAIN,
            _LOSS_SCALE_LOW_CALIBRATION_ELSEWHERE,
            _LOSS_SCALE_LOW_SLOW_CALIBRATION_AGAIN,
            _LOSS_SCALE_LOW_HUNG,
        ),
    ),
}
