"""Runbook texts: the loss scale of FP16 training with GradScaler."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

_OVERFLOW_CAUSES = (
    "The gradients have grown: check for a rising gradient norm in the hours before.",
    "A layer's activations grow towards 65 504: mostly the last residual blocks, an attention "
    "score without scaling, or a loss that is summed instead of averaged.",
    "The learning rate is too high, or its warm-up has just ended.",
    "Inputs that are not normalized, in some batches or on some ranks.",
)

LOSS_SCALE = {
    "MpAgentLossScaleLowAndFalling": Guidance(
        harm="The scale leaves too little range for small gradients, and it will soon reach its "
        "floor, where training stalls. There are minutes to hours left; act now, and stop the run "
        "if the scale keeps falling.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[15m]) < 128',
        reading="The lowest scale of the last 15 minutes. A staircase downward over the last hour "
        "confirms the alert; a sawtooth between two values is healthy.",
        causes=_OVERFLOW_CAUSES,
        false_positives=("A very short growth_interval, which keeps the scale close to overflow.",),
        samples=("overflowing_layer", "clip_after_unscale", "smaller_learning_rate"),
        panels=(panels.LOSS_SCALE, panels.LOSS_SCALE_CHANGES, panels.GRADIENT_NORM),
    ),
    "MpAgentLossScaleAtFloor": Guidance(
        harm="Training has stalled: steps are skipped at a scale of 1 or below, so the run learns "
        "nothing and does not recover. Stop it.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[15m]) <= 1',
        reading="The lowest scale of the last 15 minutes. "
        "mp_agent_loss_scale_floor_skips_total counts the steps that were skipped at that scale.",
        causes=(
            "A value is NaN or Inf at any scale: the forward pass itself overflows, or the weights "
            "are no longer finite.",
            *_OVERFLOW_CAUSES[:3],
        ),
        false_positives=(
            "A scaler that was configured with a scale of 1 or less on purpose, with rare "
            "overflows: lower loss_scale_floor, in the jobs' settings too.",
        ),
        samples=("find_the_operation", "overflowing_layer"),
        panels=(panels.LOSS_SCALE, panels.SKIPPED, panels.FIRST_NONFINITE),
    ),
    "MpAgentLossScaleConsecutiveDecreases": Guidance(
        harm="An early sign: overflows are more frequent than the scaler's growth. The run still "
        "learns; investigate within the hour.",
        query='max_over_time(mp_agent_loss_scale_consecutive_decreases{run="RUN"}[15m]) >= 5',
        reading="The number of consecutive downward changes.",
        causes=_OVERFLOW_CAUSES,
        false_positives=(
            "A resumed run whose new scaler searches for its scale long after calibration_steps: "
            "save and restore the scaler with the checkpoint.",
        ),
        samples=("overflowing_layer", "smaller_learning_rate"),
        panels=(panels.LOSS_SCALE_IN_A_ROW, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
    "MpAgentLossScaleFarBelowInitial": Guidance(
        harm="At a hundredth of the initial scale, small gradients underflow, and the scale has "
        "fallen for a long time. It does not recover by itself; act now.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[30m]) '
        '< mp_agent_loss_scale_initial{run="RUN"} / 100',
        reading="The lowest scale of the last 30 minutes, if it is below a hundredth of the first.",
        causes=_OVERFLOW_CAUSES,
        false_positives=(
            "An initial scale that was far too high (2^24 and the like), so that calibration alone "
            "reduced it a hundredfold: start with 65536.",
        ),
        samples=("overflowing_layer", "underflow_share"),
        panels=(panels.LOSS_SCALE, panels.GRADIENT_NORM, panels.ZERO_ELEMENTS),
    ),
    "MpAgentLossScaleLow": Guidance(
        harm="Healthy runs have a scale of 32 768 to 65 536. Below 1024, gradients start to "
        "underflow, which costs quality; investigate during working hours.",
        query='min_over_time(mp_agent_loss_scale{run="RUN"}[30m]) < 10000',
        reading="The lowest scale of the last 30 minutes. If the scale grows after every 2000 "
        "steps without overflow, it recovers.",
        causes=(
            "One burst of overflows, from which the scale recovers by doubling every 2000 steps.",
            *_OVERFLOW_CAUSES[:3],
        ),
        false_positives=(
            "A model whose largest gradients are always large: its suitable scale is low and "
            "remains low.",
        ),
        samples=("underflow_share", "overflowing_layer"),
        panels=(panels.LOSS_SCALE, panels.ZERO_ELEMENTS),
    ),
    "MpAgentOverflowRatioHigh": Guidance(
        harm="Every skipped step is compute without learning. Critical: more than a tenth is lost, "
        "and the scale is about to collapse. Warning: investigate within hours.",
        query='increase(mp_agent_skipped_steps_total{run="RUN"}[15m]) '
        '/ (increase(mp_agent_steps_total{run="RUN"}[15m]) > 0)',
        reading="The share of skipped steps in the last 15 minutes. The healthy value is 0.0005: "
        "one in 2000, because GradScaler doubles the scale until it overflows.",
        causes=(
            "A growth_interval far below 2000, so that the scaler increases the scale too often.",
            *_OVERFLOW_CAUSES,
        ),
        false_positives=(
            "A scaler that is tuned to stay close to overflow (growth_interval of some hundred): "
            "raise overflow_rising and overflow_warning.",
        ),
        samples=("overflowing_layer", "clip_after_unscale"),
        panels=(panels.SKIPPED, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
}
