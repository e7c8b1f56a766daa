"""Examples of alerts on steps that a loss scaler skips."""

from mp_agent.alerting.conditions.overflows import _DESCRIPTION
from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metrics import ranks, run, training
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp


def _fires(percent: str) -> str:
    return _DESCRIPTION.replace("{run}", "demo").replace("{value|percent}", percent)


_TWO_IN_A_HUNDRED = Example(
    title="2 % of the steps overflow",
    minutes=32,
    tracks=(Track(training.SKIPPED_STEPS, ramp(0, 1.2, 33)),),
    fires={Severity.WARNING: _fires("2%")},
    at=30,
)

_FIFTH = Example(
    title="every fifth step overflows",
    minutes=32,
    tracks=(Track(training.SKIPPED_STEPS, (*flat(0, 10), *ramp(12, 12, 23))),),
    fires={Severity.WARNING: _fires("20%"), Severity.CRITICAL: _fires("20%")},
    at=30,
)

_FIFTH_OF_SLOW_STEPS = Example(
    title="every fifth step of two minutes overflows",
    minutes=50,
    tracks=(
        Track(run.STEP, tuple(float(5000 + minute // 2) for minute in range(51))),
        Track(run.STEPS, tuple(float(5000 + minute // 2) for minute in range(51))),
        Track(training.SKIPPED_STEPS, tuple(100.0 + minute // 10 for minute in range(51))),
        Track(ranks.STEP_USUAL, (120,)),
    ),
    fires={Severity.WARNING: _fires("20%"), Severity.CRITICAL: _fires("20%")},
    at=50,
    not_yet=(29,),
)

_STORM = Example(
    title="a burst of overflows among fast steps, until its 15 minutes have passed",
    minutes=24,
    tracks=(Track(training.SKIPPED_STEPS, (*ramp(100, 12, 6), 160)),),
    fires={Severity.WARNING: _fires("20%"), Severity.CRITICAL: _fires("20%")},
    at=4,
    not_yet=(24,),
)

_SLOWLY_RISING = Example(
    title="a small share that rises every 15 minutes",
    minutes=70,
    tracks=(
        Track(
            training.SKIPPED_STEPS,
            (*flat(0, 25), *ramp(0.12, 0.12, 15), *ramp(2.04, 0.24, 15), *ramp(5.76, 0.36, 16)),
        ),
    ),
    fires={Severity.WARNING: _fires("0.6%")},
    at=69,
    not_yet=(30, 45),
)

_HEALTHY = Example(
    title="GradScaler's healthy 1 in 2000",
    minutes=60,
    tracks=(
        Track(training.SKIPPED_STEPS, tuple(minute * 60 // 2000 for minute in range(61))),
        Track(training.LOSS_SCALE_DECREASES, tuple(minute * 60 // 2000 for minute in range(61))),
        Track(training.LOSS_SCALE_INCREASES, tuple(minute * 60 // 2000 for minute in range(61))),
    ),
)

_SLOW_STEPS = Example(
    title="one overflow among the few steps of a slow run in the window",
    minutes=45,
    tracks=(
        Track(run.STEP, tuple(float(5000 + minute // 2) for minute in range(46))),
        Track(run.STEPS, tuple(float(5000 + minute // 2) for minute in range(46))),
        Track(training.SKIPPED_STEPS, (*flat(0, 30), 1)),
    ),
)

_SKIPS = (0, 30, 60, 80, 90)

_CALIBRATION = Example(
    title="calibration",
    minutes=40,
    tracks=(
        Track(run.STEP, ramp(0, 30, 41)),
        Track(run.STEPS, ramp(0, 30, 41)),
        Track(training.SKIPPED_STEPS, _SKIPS),
    ),
)

_CALIBRATION_ELSEWHERE = Example(
    title="calibration after a resume at step 90 000 under a new node agent",
    minutes=40,
    tracks=(
        Track(run.STEP, ramp(90_000, 30, 41)),
        Track(run.STEPS, ramp(0, 30, 41)),
        Track(training.SKIPPED_STEPS, _SKIPS),
    ),
)

_CALIBRATION_AGAIN = Example(
    title="calibration after a resume at an earlier step under the same node agent",
    minutes=45,
    tracks=(
        Track(run.STEP, (*ramp(5000, 30, 20), *ramp(4000, 30, 26))),
        Track(run.STEPS, ramp(5000, 30, 46)),
        Track(training.SKIPPED_STEPS, (*flat(0, 20), *_SKIPS)),
    ),
)

_SLOW_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt, which counts its steps from 1 and makes few of them",
    minutes=50,
    tracks=(
        Track(run.STEP, (*ramp(5000, 60, 10), *ramp(1, 10, 41))),
        Track(run.STEPS, (*ramp(5000, 60, 10), *ramp(5600, 10, 41))),
        Track(training.SKIPPED_STEPS, (*flat(0, 41), *_SKIPS)),
    ),
)


def _shares(*per_quarter: float) -> Track:
    """Skipped steps of a run that skips so many in each quarter of an hour."""
    skipped = [0.0]
    for skips in per_quarter:
        skipped += [skipped[-1] + skips / 15 * minute for minute in range(1, 16)]
    return Track(training.SKIPPED_STEPS, tuple(skipped))


_RISING_TOO_LOW = Example(
    title="a share that rises below 0.1 %",
    minutes=60,
    tracks=(
        _shares(0, 6, 9, 12),
        Track(run.STEP, ramp(5000, 1200, 61)),
        Track(run.STEPS, ramp(5000, 1200, 61)),
    ),
)

_FELL_BEFORE = Example(
    title="a share that fell and rises again",
    minutes=75,
    tracks=(_shares(8, 7, 3, 2.5, 7),),
)

_ROSE_BEFORE = Example(
    title="a share that rose and falls again",
    minutes=75,
    tracks=(_shares(8.5, 8.4, 1, 8, 5),),
)

_ALL_BUT_STEADY = Example(
    title="a scale close to overflow, with a random number of skips",
    minutes=60,
    tracks=(_shares(4, 4, 4.5, 5),),
)

_SEEN_LATE = Example(
    title="a small share of a run that was first scraped half an hour ago, at step 5000",
    minutes=45,
    tracks=(_shares(4, 4.2, 4.5),),
)


EXAMPLES = {
    "MpAgentOverflowRatioHigh": Examples(
        firing=(_TWO_IN_A_HUNDRED, _FIFTH, _FIFTH_OF_SLOW_STEPS, _STORM, _SLOWLY_RISING),
        quiet=(
            _HEALTHY,
            _SLOW_STEPS,
            _CALIBRATION,
            _CALIBRATION_ELSEWHERE,
            _CALIBRATION_AGAIN,
            _SLOW_CALIBRATION_AGAIN,
            _RISING_TOO_LOW,
            _FELL_BEFORE,
            _ROSE_BEFORE,
            _ALL_BUT_STEADY,
            _SEEN_LATE,
        ),
    ),
}
