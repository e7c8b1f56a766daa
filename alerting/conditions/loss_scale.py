"""Alerts on the loss scale: low, falling, at its floor."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import calibrated, happened, restarted, standing
from mp_agent.alerting.conditions.overflows import OVERFLOW_REMEDIES, WHY_OVERFLOW_ENDS
from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.terms import (
    Compare,
    Count,
    Joined,
    Limit,
    Predicate,
    Recorded,
    Series,
    all_of,
    any_of,
    limit,
    unless,
)
from mp_agent.alerting.first_line import UPDATED, Triage
from mp_agent.alerting.severity import Severity

WINDOW = duration("loss_scale_window")
SCALE = Series(metric=metrics.LOSS_SCALE, aggregate="min")
CALIBRATED = Series(metric=metrics.LOSS_SCALE_CALIBRATED)
INITIAL = Series(metric=metrics.LOSS_SCALE_INITIAL)
FALLEN = Compare(SCALE, "<=", limit("loss_scale_share_of_calibrated") * CALIBRATED)
"""Three times halved since calibration: a halving or two come and go in any healthy run."""
DECREASES = Recorded(
    "run:mp_agent_loss_scale_decreases:increase",
    Count(metric=metrics.LOSS_SCALE_DECREASES, window=WINDOW),
)

_ALIVE = duration("alive_window")


def hung() -> Predicate:
    """Return whether the run has ceased to make steps: its scale says nothing new."""
    return standing(_ALIVE)


def after_calibration(*claims: Predicate) -> Joined:
    """Hold claims on the scale of a run that makes steps, long after its calibration."""
    return unless(all_of(*claims, calibrated(WINDOW)), restarted(), hung())


_LIMIT = limit("loss_scale_decreases_in_row")
_IN_ROW = Series(metric=metrics.LOSS_SCALE_CONSECUTIVE_DECREASES)


LOSS_SCALE_CONSECUTIVE_DECREASES = Condition(
    name="MpAgentLossScaleConsecutiveDecreases",
    summary="The loss scale was lowered repeatedly and never raised.",
    meaning="Gradients overflow FP16 more often than the scale can recover: the run loses "
    "range, and one step with each decrease.",
    confirm="mp_agent_loss_scale_consecutive_decreases counts the decreases; "
    "mp_agent_loss_scale shows a downward staircase.",
    remedies=OVERFLOW_REMEDIES,
    why=WHY_OVERFLOW_ENDS,
    levels=(
        Level(
            severity=Severity.WARNING,
            when=after_calibration(
                Compare(_IN_ROW, ">=", _LIMIT), Compare(DECREASES, ">=", _LIMIT)
            ),
            keep=duration("loss_scale_keep"),
            description="The loss scale of run {run} was lowered {value|count} consecutive "
            "times in the last <loss_scale_window>.",
            reason="No delay: five decreases do not occur by chance; the alert lasts beyond the "
            "first increase, which a sixth decrease may follow.",
        ),
    ),
    quiet=(
        "four decreases, then one growth",
        "five decreases over an hour and a half",
        "a scale of short growth intervals that goes up and down every minute",
        "calibration from 65536 to 1024",
        "calibration after a resume at an earlier step under the same node agent",
        "calibration after a resume at step 90 000 under a new node agent",
        "calibration of the next attempt, which counts its steps from 1 and makes few of them",
        "a run that hung while the scale was falling",
    ),
)


_FLOOR = limit("loss_scale_floor")
_SCALE = Series(metric=metrics.LOSS_SCALE, aggregate="min")
_STALLS = Count(metric=metrics.LOSS_SCALE_FLOOR_STALLS, window=duration("floor_window"))


LOSS_SCALE_AT_FLOOR = Condition(
    name="MpAgentLossScaleAtFloor",
    summary="The loss scale is at its floor and steps are still skipped.",
    meaning="Training has stalled: gradients overflow FP16 even without scaling, so GradScaler "
    "skips every step and the weights no longer change.",
    confirm="mp_agent_skipped_steps_total grows as fast as mp_agent_steps_total.",
    remedies=OVERFLOW_REMEDIES,
    why=WHY_OVERFLOW_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="intact, since skipped steps do not change them",
                now="stop, and resume from the last checkpoint with BF16 or a lower learning rate",
                updated=UPDATED,
            ),
            when=any_of(
                Compare(_SCALE, "<", _FLOOR),
                all_of(Compare(_SCALE, "<=", _FLOOR), happened(_STALLS)),
            ),
            keep=duration("loss_scale_keep"),
            reason="No delay: every such step is lost; the alert lasts beyond single successful "
            "steps between skipped ones.",
            description="The loss scale of run {run} is down to "
            "{value|number} and gradients still overflow: GradScaler skips its steps.",
        ),
    ),
    quiet=(
        "one dip to 1, where the scale stays for 2000 steps without overflow",
        "a burst of overflows that has ended, with the scale recovering",
        "a run without a scaler",
    ),
)


_SHARE = limit("loss_scale_share_of_initial")
_FAR_BELOW = Compare(SCALE, "<", _SHARE * INITIAL)
_SINCE_CALIBRATION = any_of(
    Compare(CALIBRATED, ">=", _SHARE * INITIAL), Compare(SCALE, "<", _SHARE * CALIBRATED)
)
"""Where calibration itself had ended so low, the rest of the fall is no collapse."""


LOSS_SCALE_FAR_BELOW_INITIAL = Condition(
    name="MpAgentLossScaleFarBelowInitial",
    summary="The loss scale has collapsed since calibration.",
    meaning="The gradients have grown a hundredfold, or overflow permanently: small gradients "
    "now underflow to zero, and the scale falls towards its floor.",
    confirm="Compare mp_agent_loss_scale with mp_agent_loss_scale_initial and "
    "mp_agent_loss_scale_calibrated; mp_agent_grad_norm_window_max shows whether gradients grew.",
    remedies=OVERFLOW_REMEDIES,
    why=WHY_OVERFLOW_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="intact, since skipped steps do not change them",
                now="save a checkpoint, before the scale reaches its floor",
                updated=UPDATED,
            ),
            when=unless(
                all_of(_FAR_BELOW, FALLEN, _SINCE_CALIBRATION),
                hung(),
            ),
            hold=duration("loss_scale_collapse_hold"),
            keep=duration("loss_scale_keep"),
            description="The loss scale of run {run} has fallen to {value|number}, less than "
            "<loss_scale_share_of_initial> of its initial value.",
            reason="The delay distinguishes a continuing run from a hung one; the alert lasts "
            "beyond increases between two decreases.",
        ),
    ),
    quiet=(
        "calibration that overshoots to 512 and recovers",
        "calibration that ends at 64: low, but no collapse",
        "a scale that falls from 512, where calibration had left it, to 64 within an hour",
        "one halving of a scale that was just above the limit after calibration",
        "a resumed run that repeats its calibration",
        "a dip of a minute",
        "a run that hung right after its scale fell",
    ),
)


_REDUCED, _REDUCED_HOLD = limit("loss_scale_reduced"), duration("loss_scale_reduced_hold")
_VERY_LOW, _VERY_LOW_HOLD = limit("loss_scale_very_low"), duration("loss_scale_very_low_hold")


def _below(bound: Limit) -> Joined:
    return after_calibration(Compare(SCALE, "<", bound), Compare(INITIAL, ">=", bound))


def _description(bound: Limit, hold: Duration) -> str:
    return (
        f"The loss scale of run {{run}} has been below <{bound.threshold.name}> for "
        f"<{hold.name}>; it is {{value|number}}; the healthy range is 32768 to 65536."
    )


LOSS_SCALE_LOW = Condition(
    name="MpAgentLossScaleLow",
    summary="The loss scale is far below its healthy range.",
    meaning="Small gradients are closer to FP16's smallest number than necessary: the lower the "
    "scale, the more of them become zero.",
    confirm="Plot mp_agent_loss_scale over the last day; mp_agent_grad_fp16_headroom shows how "
    "far the largest gradient is from an overflow.",
    remedies=OVERFLOW_REMEDIES,
    why=WHY_OVERFLOW_ENDS,
    levels=(
        Level(
            severity=Severity.WARNING,
            when=_below(_VERY_LOW),
            hold=_VERY_LOW_HOLD,
            keep=duration("loss_scale_keep"),
            description=_description(_VERY_LOW, _VERY_LOW_HOLD),
            reason="A scale halves and recovers by design; only a scale that stays low is a "
            "problem, and a single increase does not end the alert.",
        ),
        Level(
            severity=Severity.INFO,
            when=_below(_REDUCED),
            hold=_REDUCED_HOLD,
            keep=duration("loss_scale_keep"),
            description=_description(_REDUCED, _REDUCED_HOLD),
            reason="As for the warning, with a longer delay because it is less severe.",
        ),
    ),
    quiet=(
        "dips below both limits for a few minutes",
        "an initial scale of 4096 that stays",
        "an initial scale of 512 that stays",
        "a long calibration of slow steps that ends high",
        "calibration after a resume at an earlier step under the same node agent",
        "calibration after a resume at step 90 000 under a new node agent",
        "calibration of the next attempt, which counts its steps from 1 and makes few of them",
        "a run that hung with a low scale",
    ),
)


_LOW = limit("loss_scale_low")
_LATELY = Series(
    metric=metrics.LOSS_SCALE, over=("max_over_time", duration("loss_scale_fall_window"))
)
_FALLEN_LATELY = Compare(SCALE, "<=", limit("loss_scale_share_of_calibrated") * _LATELY)
_NET_DECREASES = DECREASES - Count(metric=metrics.LOSS_SCALE_INCREASES, window=WINDOW)

_DESCRIPTION = (
    "The loss scale of run {run} is {value|number}: below <loss_scale_low> and falling, by "
    "<loss_scale_net_decreases> or more net decreases in the last <loss_scale_window>, or "
    "within <loss_scale_fall_window> to <loss_scale_share_of_calibrated> of the calibrated "
    "value."
)


LOSS_SCALE_LOW_AND_FALLING = Condition(
    name="MpAgentLossScaleLowAndFalling",
    summary="The loss scale is low and still falling.",
    meaning="Gradients overflow FP16 repeatedly: each overflow costs a step, and at a low scale "
    "the small gradients underflow to zero.",
    confirm="Plot mp_agent_loss_scale together with mp_agent_skipped_steps_total: a downward "
    "staircase with a skipped step at each decrease.",
    remedies=OVERFLOW_REMEDIES,
    why=WHY_OVERFLOW_ENDS,
    levels=(
        Level(
            severity=Severity.WARNING,
            when=after_calibration(
                Compare(SCALE, "<", _LOW),
                any_of(
                    Compare(_NET_DECREASES, ">=", limit("loss_scale_net_decreases")),
                    all_of(FALLEN, _FALLEN_LATELY),
                ),
                Compare(INITIAL, ">=", _LOW),
            ),
            hold=duration("alive_window"),
            keep=duration("loss_scale_keep"),
            reason="The delay distinguishes a continuing run from one that hung during the "
            "fall; the alert lasts beyond pauses between two overflows.",
            description=_DESCRIPTION,
        ),
    ),
    quiet=(
        "a sawtooth between 64 and 128",
        "calibration from 65536 to 64",
        "calibration after a resume at step 90 000 under a new node agent",
        "calibration after a resume at an earlier step under the same node agent",
        "calibration of the next attempt, which counts its steps from 1 and makes few of them",
        "a run that hung while the scale was falling",
        "a scale that fell before the recorded history, and has stayed at 64 for days",
        "a scale of 64 after calibration from 512",
        "a run that starts below the limit on purpose",
    ),
)
