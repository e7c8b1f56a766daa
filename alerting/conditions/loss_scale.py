"""Alerts on the loss scale: low, falling, at its floor."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above, less_below
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.conditions.mixed_precision import (
    OVERFLOW_CAUSES,
    OVERFLOW_REMEDIES,
    WHY_OVERFLOW_ENDS,
)
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import (
    Compare,
    Count,
    Joined,
    Seen,
    Series,
    Where,
    all_of,
    any_of,
    limit,
)
from mp_agent.alerting.first_line import UPDATED, Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import training

SCALE = Series(metric=training.LOSS_SCALE, aggregate="min")
_WINDOW = duration("loss_scale_window")


def _steps(name: str) -> Series:
    """Return on how many steps in a row the scale was low by a threshold."""
    return Series(metric=training.LOSS_SCALE_LOW_STEPS, where=(Where("limit", "=", name),))


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
            when=happened(Count(metric=training.LOSS_SCALE_LOWERED_AGAIN, window=_WINDOW)),
            keep=duration("loss_scale_keep"),
            description="The loss scale of run {run} was lowered <loss_scale_decreases_in_row> or "
            "more consecutive times within <loss_scale_change_steps> steps.",
            reason="No delay: five decreases do not occur by chance; the alert lasts beyond the "
            "first increase, which a sixth decrease may follow.",
        ),
    ),
    quiet=(
        "four decreases, then one growth",
        "five decreases, far apart",
        "a scale of short growth intervals that goes up and down every minute",
        "calibration from 65536 to 1024",
        "calibration of the next attempt",
    ),
    follows_from=("MpAgentLossScaleAtFloor", "MpAgentLossScaleFarBelowInitial"),
    needs=((Quantity.LOSS_SCALE,),),
    knobs=(less_above("loss_scale_decreases_in_row"),),
    guidance=Guidance(
        harm="An early sign: overflows are more frequent than the scaler's growth. The run still "
        "learns; investigate within the hour.",
        query='max_over_time(mp_agent_loss_scale_consecutive_decreases{run="RUN"}[15m]) >= 5',
        reading="The number of consecutive downward changes.",
        causes=OVERFLOW_CAUSES,
        false_positives=(
            "A resumed run whose new scaler searches for its scale long after calibration_steps: "
            "save and restore the scaler with the checkpoint.",
        ),
        samples=("overflowing_layer", "smaller_learning_rate"),
        panels=(panels.LOSS_SCALE_IN_A_ROW, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
)


_FLOOR = limit("loss_scale_floor")
_SCALE = Series(metric=training.LOSS_SCALE, aggregate="min")
_STALLS = Count(metric=training.LOSS_SCALE_FLOOR_STALLS, window=duration("floor_window"))


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
    follows_from=(
        "MpAgentActivationNonFinite",
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
    ),
    needs=((Quantity.LOSS_SCALE, Quantity.SKIPS),),
    knobs=(less_below("loss_scale_floor"),),
    guidance=Guidance(
        harm="Training has stalled: steps are skipped at a scale of 1 or below, so the run learns "
        "nothing and does not recover. Stop it.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[15m]) <= 1',
        reading="The lowest scale of the last 15 minutes. "
        "mp_agent_loss_scale_floor_skips_total counts the steps that were skipped at that scale.",
        causes=(
            "A value is NaN or Inf at any scale: the forward pass itself overflows, or the weights "
            "are no longer finite.",
            *OVERFLOW_CAUSES[:3],
        ),
        false_positives=(
            "A scaler that was configured with a scale of 1 or less on purpose, with rare "
            "overflows: lower loss_scale_floor, in the jobs' settings too.",
        ),
        samples=("find_the_operation", "overflowing_layer"),
        panels=(panels.LOSS_SCALE, panels.SKIPPED, panels.FIRST_NONFINITE),
    ),
)


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
            when=all_of(
                Seen(SCALE),
                Compare(
                    _steps("loss_scale_share_of_initial"),
                    ">=",
                    limit("loss_scale_share_of_initial_steps"),
                ),
            ),
            keep=duration("loss_scale_keep"),
            counted=_steps("loss_scale_share_of_initial"),
            description="The loss scale of run {run} has fallen to {value|number}, less than "
            "<loss_scale_share_of_initial> of its initial value, for "
            "<loss_scale_share_of_initial_steps> steps or more.",
            reason="No delay: it takes loss_scale_share_of_initial_steps steps; the alert "
            "lasts beyond increases between two decreases.",
        ),
    ),
    quiet=(
        "calibration that overshoots to 512 and recovers",
        "calibration that ends at 64: low, but no collapse",
        "a scale that falls from 512, where calibration had left it, to 64",
        "one halving of a scale that was just above the limit after calibration",
        "calibration of the next attempt",
        "a dip of some steps",
        "a run that hung right after its scale fell",
    ),
    follows_from=("MpAgentLossScaleAtFloor", "MpAgentGradientExplosion", "MpAgentLearningRateJump"),
    needs=((Quantity.LOSS_SCALE,),),
    knobs=(less_below("loss_scale_share_of_calibrated"), less_below("loss_scale_share_of_initial")),
    guidance=Guidance(
        harm="At a hundredth of the initial scale, small gradients underflow, and the scale has "
        "fallen for a long time. It does not recover by itself; act now.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[30m]) '
        '< mp_agent_loss_scale_initial{run="RUN"} / 100',
        reading="The lowest scale of the last 30 minutes, if it is below a hundredth of the first.",
        causes=OVERFLOW_CAUSES,
        false_positives=(
            "An initial scale that was far too high (such as 2^24), so that calibration alone "
            "reduced it a hundredfold: start with 65536.",
        ),
        samples=("overflowing_layer", "underflow_share"),
        panels=(panels.LOSS_SCALE, panels.GRADIENT_NORM, panels.ZERO_ELEMENTS),
    ),
)


def _below(name: str) -> Joined:
    return all_of(Seen(SCALE), Compare(_steps(name), ">=", limit(f"{name}_steps")))


def _description(name: str) -> str:
    return (
        f"The loss scale of run {{run}} has been below <{name}> for <{name}_steps> steps or more; "
        "it is {value|number}; the healthy range is 32768 to 65536."
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
            when=_below("loss_scale_very_low"),
            keep=duration("loss_scale_keep"),
            description=_description("loss_scale_very_low"),
            counted=_steps("loss_scale_very_low"),
            reason="A scale halves and recovers by design; only a scale that stays low is a "
            "problem, and a single increase does not end the alert.",
        ),
        Level(
            severity=Severity.INFO,
            when=_below("loss_scale_reduced"),
            keep=duration("loss_scale_keep"),
            description=_description("loss_scale_reduced"),
            counted=_steps("loss_scale_reduced"),
            reason="As for the warning, over more steps because it is less severe.",
        ),
    ),
    quiet=(
        "dips below both limits for some hundred steps",
        "an initial scale of 4096 that stays",
        "an initial scale of 512 that stays",
        "a long calibration that ends high",
        "calibration of the next attempt",
        "a run that hung with a low scale",
    ),
    follows_from=("MpAgentLossScaleAtFloor", "MpAgentLossScaleFarBelowInitial"),
    needs=((Quantity.LOSS_SCALE,),),
    knobs=(less_below("loss_scale_very_low", "loss_scale_reduced"),),
    guidance=Guidance(
        harm="Healthy runs have a scale of 32 768 to 65 536. Below 1024, gradients start to "
        "underflow, which costs quality; investigate during working hours.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[30m]) < 10000',
        reading="The lowest scale of the last 30 minutes. If the scale grows after every 2000 "
        "steps without overflow, it recovers.",
        causes=(
            "One burst of overflows, from which the scale recovers by doubling every 2000 steps.",
            *OVERFLOW_CAUSES[:3],
        ),
        false_positives=(
            "A model whose largest gradients are always large: its suitable scale is low and "
            "remains low.",
        ),
        samples=("underflow_share", "overflowing_layer"),
        panels=(panels.LOSS_SCALE, panels.ZERO_ELEMENTS),
    ),
)


_DESCRIPTION = (
    "The loss scale of run {run} is {value|number}: below <loss_scale_low> and falling, by "
    "<loss_scale_net_decreases> or more net decreases within <loss_scale_change_steps> steps, or "
    "within <loss_scale_fall_steps> steps to <loss_scale_share_of_calibrated> of the calibrated "
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
            when=all_of(
                Seen(SCALE),
                Compare(_steps("loss_scale_low"), ">=", limit("loss_scale_low_steps")),
            ),
            keep=duration("loss_scale_keep"),
            reason="No delay: it takes loss_scale_low_steps steps, which a run that hung "
            "during the fall does not make; the alert lasts beyond pauses between two overflows.",
            description=_DESCRIPTION,
            counted=_steps("loss_scale_low"),
        ),
    ),
    quiet=(
        "a sawtooth between 64 and 128",
        "calibration from 65536 to 64",
        "calibration of the next attempt",
        "a run that hung while the scale was falling",
        "a scale that fell long ago, and has stayed at 64",
        "a scale of 64 after calibration from 512",
        "a run that starts below the limit on purpose",
    ),
    follows_from=("MpAgentLossScaleAtFloor", "MpAgentLossScaleFarBelowInitial"),
    needs=((Quantity.LOSS_SCALE,),),
    knobs=(
        less_below("loss_scale_share_of_calibrated"),
        less_above("loss_scale_net_decreases"),
        less_below("loss_scale_low"),
    ),
    guidance=Guidance(
        harm="The scale leaves too little range for small gradients, and it will soon reach its "
        "floor, where training stalls. There are minutes to hours left; act now, and stop the run "
        "if the scale keeps falling.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[15m]) < 128',
        reading="The lowest scale of the last 15 minutes. A staircase downward over the last hour "
        "confirms the alert; a sawtooth between two values is healthy.",
        causes=OVERFLOW_CAUSES,
        false_positives=("A very short growth_interval, which keeps the scale close to overflow.",),
        samples=("overflowing_layer", "clip_after_unscale", "smaller_learning_rate"),
        panels=(panels.LOSS_SCALE, panels.LOSS_SCALE_CHANGES, panels.GRADIENT_NORM),
    ),
)


CONDITIONS = (
    LOSS_SCALE_LOW_AND_FALLING,
    LOSS_SCALE_AT_FLOOR,
    LOSS_SCALE_CONSECUTIVE_DECREASES,
    LOSS_SCALE_FAR_BELOW_INITIAL,
    LOSS_SCALE_LOW,
)
