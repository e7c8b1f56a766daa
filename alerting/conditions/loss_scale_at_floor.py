"""MpAgentLossScaleAtFloor."""

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.overflow import OVERFLOW_REMEDIES, WHY_OVERFLOW_ENDS
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples import Example, Track, flat, ramp
from mp_agent.alerting.predicates import Compare, all_of, any_of
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.signals import Count, Series, limit

_WINDOW = duration("floor_window")
_FLOOR = limit("loss_scale_floor")
_SCALE = Series(metric=metrics.LOSS_SCALE, aggregate="min")
_SKIPS = Count(metric=metrics.LOSS_SCALE_FLOOR_SKIPS, window=_WINDOW)
_TOLERATED_SKIPS = limit("floor_skip_share") * Count(metric=metrics.STEPS, window=_WINDOW)

_STUCK = Example(
    title="steps overflow at a scale that is held at 1; the alert outlasts it",
    minutes=20,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(4, 10), *flat(1, 6), 2)),
        Track(metrics.LOSS_SCALE_INITIAL, (16,)),
        Track(metrics.LOSS_SCALE_FLOOR_SKIPS, (*flat(0, 11), *ramp(30, 60, 10))),
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
        Track(metrics.LOSS_SCALE_FLOOR_SKIPS, (None, None, 2)),
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
    title="one dip to 1, where the scale then stays for 2000 clean steps",
    minutes=40,
    tracks=(
        Track(metrics.LOSS_SCALE, (*flat(2, 5), *flat(1, 33), 2)),
        Track(metrics.LOSS_SCALE_INITIAL, (16,)),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 5), 1)),
        Track(metrics.SKIPPED_STEPS, (*flat(0, 5), 1)),
    ),
)

_SKIPS_FAR_APART = Example(
    title="some skips at the floor among hundreds of clean steps",
    minutes=40,
    tracks=(
        Track(metrics.LOSS_SCALE, (1,)),
        Track(metrics.LOSS_SCALE_INITIAL, (16,)),
        Track(metrics.LOSS_SCALE_FLOOR_SKIPS, (*flat(0, 10), 1, 2, 3, 4)),
    ),
)

_TWO_SLOW_SKIPS = Example(
    title="two skips at the floor in a run that makes a step a minute",
    minutes=9,
    tracks=(
        Track(metrics.LOSS_SCALE, (1,)),
        Track(metrics.LOSS_SCALE_INITIAL, (16,)),
        Track(metrics.LOSS_SCALE_FLOOR_SKIPS, (*flat(0, 5), 1, 2)),
        Track(metrics.STEP, ramp(5000, 1, 10)),
        Track(metrics.STEPS, ramp(5000, 1, 10)),
    ),
)

_NO_SCALER = Example(
    title="a run without a scaler",
    minutes=20,
    without=(metrics.LOSS_SCALE, metrics.LOSS_SCALE_INITIAL),
)

LOSS_SCALE_AT_FLOOR = Condition(
    name="MpAgentLossScaleAtFloor",
    summary="The loss scale is at its floor and steps are still being skipped.",
    meaning="Training has stalled: gradients overflow FP16 even without scaling, so that "
    "GradScaler skips step after step and the weights no longer change.",
    confirm="mp_agent_skipped_steps_total grows as fast as mp_agent_steps_total.",
    remedies=OVERFLOW_REMEDIES,
    why=WHY_OVERFLOW_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            when=any_of(
                Compare(_SCALE, "<", _FLOOR),
                all_of(
                    Compare(_SCALE, "<=", _FLOOR),
                    Compare(_SKIPS, ">=", limit("floor_skips")),
                    Compare(_SKIPS, ">=", _TOLERATED_SKIPS),
                ),
            ),
            keep=duration("loss_scale_keep"),
            description="The loss scale of run {{ $labels.run }} is down to "
            '{{ printf "%.4g" $value }} and gradients still overflow: GradScaler skips its steps.',
        ),
    ),
    firing=(_STUCK, _STORM),
    quiet=(_ONE_DIP, _SKIPS_FAR_APART, _TWO_SLOW_SKIPS, _NO_SCALER),
)
