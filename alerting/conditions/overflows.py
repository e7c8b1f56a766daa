"""Alerts on steps that a loss scaler skips."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import Count, Predicate, Where, any_of, limit
from mp_agent.alerting.first_line import UPDATED, Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import training

OVERFLOW_REMEDIES = (
    "Reduce the learning rate tenfold and check that the inputs are normalized.",
    "Check the initialization (Xavier weights, zero biases) and add LayerNorm to residual "
    "branches.",
    "Find the layer that overflows and run it in FP32, or train in BF16; a lower initial scale "
    "only shortens calibration.",
)
WHY_OVERFLOW_ENDS = (
    "GradScaler halves the scale whenever a scaled gradient overflows FP16; if that continues, "
    "no scale is suitable, and the values themselves must shrink."
)
OVERFLOW_CAUSES = (
    "The gradients have grown: check for a rising gradient norm in the hours before.",
    "A layer's activations grow towards 65 504: mostly the last residual blocks, an attention "
    "score without scaling, or a loss that is summed instead of averaged.",
    "The learning rate is too high, or its warm-up has just ended.",
    "Inputs that are not normalized, in some batches or on some ranks.",
)


def _above(bound: str) -> Predicate:
    where = (Where("bound", "=", limit(bound)),)
    window = duration("overflow_window")
    return happened(Count(metric=training.SKIPPED_EXCESS, window=window, where=where))


def _description(bound: str) -> str:
    return (
        f"Run {{run}} skips more than <{bound}> of its steps because gradients overflow: "
        "{value|count} step(s) in the last <overflow_window> came when that many of the last "
        "<overflow_share_steps> had been skipped; the healthy value is 0.05%."
    )


OVERFLOW_RATIO_HIGH = Condition(
    name="MpAgentOverflowRatioHigh",
    summary="Too many steps are skipped because gradients overflow FP16.",
    meaning="Each skipped step is compute without learning, and a high or rising share precedes "
    "a collapse of the loss scale.",
    confirm="Divide the increase of mp_agent_skipped_steps_total by that of mp_agent_steps_total.",
    remedies=OVERFLOW_REMEDIES,
    why=WHY_OVERFLOW_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="intact, since skipped steps do not change them",
                now="save a checkpoint, before the loss scale collapses",
                updated=UPDATED,
            ),
            when=_above("overflow_critical"),
            description=_description("overflow_critical"),
            reason="No delay: the share is that of overflow_share_steps steps.",
        ),
        Level(
            severity=Severity.WARNING,
            when=any_of(_above("overflow_warning"), _above("overflow_rising")),
            description=_description("overflow_rising"),
            reason="No delay: the share is that of overflow_share_steps steps.",
        ),
    ),
    quiet=(
        "GradScaler's healthy 1 in 2000",
        "two overflows among few steps",
        "calibration",
        "calibration of the next attempt",
        "a share that rises below 0.1 %",
        "a share that fell and rises again",
        "a scale close to overflow, with a random number of skips",
    ),
    follows_from=(
        "MpAgentLossScaleAtFloor",
        "MpAgentGradientNonFinite",
        "MpAgentLossScaleFarBelowInitial",
    ),
    needs=((Quantity.SKIPS,),),
    knobs=(less_above("overflow_warning", "overflow_critical", "overflow_rising"),),
    guidance=Guidance(
        harm="Every skipped step is compute without learning. Critical: more than a tenth is lost, "
        "and the scale is about to collapse. Warning: investigate within hours.",
        query='increase(mp_agent_skipped_steps_total{run="RUN"}[15m]) '
        '/ (increase(mp_agent_steps_total{run="RUN"}[15m]) > 0)',
        reading="The share of skipped steps in the last 15 minutes. The healthy value is 0.0005: "
        "one in 2000, because GradScaler doubles the scale until it overflows.",
        causes=(
            "A growth_interval far below 2000, so that the scaler increases the scale too often.",
            "A GradScaler that is made again in each iteration, or whose update() is never called: "
            "the scale never falls, and every step is skipped.",
            *OVERFLOW_CAUSES,
        ),
        false_positives=(
            "A scaler that is tuned to stay close to overflow (growth_interval of some hundred): "
            "raise overflow_rising and overflow_warning.",
        ),
        samples=("overflowing_layer", "clip_after_unscale"),
        panels=(panels.SKIPPED, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
)


CONDITIONS = (OVERFLOW_RATIO_HIGH,)
