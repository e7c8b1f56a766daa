"""Runbook texts: the loss scale of FP16 training with GradScaler."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

_OVERFLOW_CAUSES = (
    "The gradients have grown: look for a rising gradient norm in the hours before.",
    "A layer's activations grow towards 65 504: mostly the last residual blocks, an attention "
    "score without scaling, or a loss that is summed instead of averaged.",
    "The learning rate is too high, or has just left its warm-up.",
    "Inputs that are not normalised, in some batches or on some ranks.",
)

LOSS_SCALE = {
    "MpAgentLossScaleLowAndFalling": Guidance(
        harm="The scale leaves small gradients too little range, and soon it ends at its floor, "
        "where training stalls. There are minutes to hours; look now, stop it if it goes on.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[15m]) < 128',
        reading="The lowest scale of the last quarter of an hour. Over the last hour it should be "
        "a staircase downward; a sawtooth between two values is healthy.",
        causes=_OVERFLOW_CAUSES,
        false_positives=(
            "A very short growth_interval, which keeps the scale at the edge of overflow.",
        ),
        samples=("overflowing_layer", "clip_after_unscale", "smaller_learning_rate"),
        panels=(panels.LOSS_SCALE, panels.LOSS_SCALE_CHANGES, panels.GRADIENT_NORM),
    ),
    "MpAgentLossScaleAtFloor": Guidance(
        harm="Training has stalled: steps are skipped at a scale of 1 or below, so nothing is "
        "learnt and nothing gets better by waiting. Stop the run.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[15m]) <= 1',
        reading="The lowest scale of the last quarter of an hour. "
        "mp_agent_loss_scale_floor_skips_total counts the steps that were skipped there.",
        causes=(
            "Some value is NaN or Inf whatever the scale: the forward pass itself overflows, or "
            "the weights are no longer finite.",
            *_OVERFLOW_CAUSES[:3],
        ),
        false_positives=(
            "A scaler that was given a scale of 1 or less on purpose, with rare overflows: lower "
            "loss_scale_floor, in the jobs' settings too.",
        ),
        samples=("find_the_operation", "overflowing_layer"),
        panels=(panels.LOSS_SCALE, panels.SKIPPED, panels.FIRST_NONFINITE),
    ),
    "MpAgentLossScaleConsecutiveDecreases": Guidance(
        harm="An early sign: overflow now outruns the scaler's growth. The run still learns; look "
        "within the hour.",
        query='max_over_time(mp_agent_loss_scale_consecutive_decreases{run="RUN"}[15m]) >= 5',
        reading="How many changes in a row went down.",
        causes=_OVERFLOW_CAUSES,
        false_positives=(
            "A resumed run whose new scaler searches for its scale long after calibration_steps: "
            "save and restore the scaler with the checkpoint.",
        ),
        samples=("overflowing_layer", "smaller_learning_rate"),
        panels=(panels.LOSS_SCALE_IN_A_ROW, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
    "MpAgentLossScaleFarBelowInitial": Guidance(
        harm="At a hundredth of the initial scale small gradients underflow, and the run has been "
        "on its way down for long. It will not come back by itself; look now.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[30m]) '
        '< mp_agent_loss_scale_initial{run="RUN"} / 100',
        reading="The lowest scale of the last half hour, if it is below a hundredth of the first.",
        causes=_OVERFLOW_CAUSES,
        false_positives=(
            "An initial scale that was far too high (2^24 and the like), so that calibration alone "
            "took it down a hundredfold: start with 65536.",
        ),
        samples=("overflowing_layer", "underflow_share"),
        panels=(panels.LOSS_SCALE, panels.GRADIENT_NORM, panels.ZERO_ELEMENTS),
    ),
    "MpAgentLossScaleLow": Guidance(
        harm="Healthy runs keep a scale of 32 768 to 65 536. Below 1024 gradients begin to "
        "underflow, which costs quality; look in working hours.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[30m]) < 10000',
        reading="The lowest scale of the last half hour. If the scale grows again after every 2000 "
        "clean steps, it recovers.",
        causes=(
            "One burst of overflow, from which the scale climbs back twofold every 2000 steps.",
            *_OVERFLOW_CAUSES[:3],
        ),
        false_positives=(
            "A model whose largest gradients are large by nature: the scale that fits it is low, "
            "and stays so.",
        ),
        samples=("underflow_share", "overflowing_layer"),
        panels=(panels.LOSS_SCALE, panels.ZERO_ELEMENTS),
    ),
    "MpAgentOverflowRatioHigh": Guidance(
        harm="Every skipped step is compute without learning. Critical: more than a tenth is lost, "
        "and the scale is about to collapse. Warning: look within hours.",
        query='increase(mp_agent_skipped_steps_total{run="RUN"}[15m]) '
        '/ (increase(mp_agent_steps_total{run="RUN"}[15m]) > 0)',
        reading="The share of the last quarter of an hour's steps that were skipped. Healthy is "
        "0.0005: one in 2000, because GradScaler doubles the scale until it overflows.",
        causes=(
            "A growth_interval far below 2000, which makes the scaler try too often.",
            *_OVERFLOW_CAUSES,
        ),
        false_positives=(
            "A scaler that is tuned to live at the edge (growth_interval of some hundred): raise "
            "overflow_rising and overflow_warning.",
        ),
        samples=("overflowing_layer", "clip_after_unscale"),
        panels=(panels.SKIPPED, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
}
