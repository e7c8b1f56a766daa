"""Guidance on the loss and the loss scale."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.panels import Guidance

LOSS = {
    "MpAgentLossNonFinite": Guidance(
        harm="Without a scaler, the update of that step has destroyed the weights: stop the run. "
        "With a scaler the step was skipped; three consecutive ones mean that the run does not "
        "recover by itself.",
        query='mp_agent_loss_nonfinite_steps_total{run="RUN"} > 0',
        reading="The number of steps with such a loss. If mp_agent_skipped_steps_total grew by "
        "the same number, the weights are still intact.",
        causes=(
            "An overflow in FP16: softmax, exp, pow, a variance or a large sum exceeded 65 504.",
            "log(0) or a division by zero: binary_cross_entropy after a sigmoid, a masked mean "
            "over no tokens, the norm of a zero vector.",
            "Weights damaged by an earlier explosion: check the gradient norm before.",
            "Corrupt data on one rank: mp_agent_rank_loss_nonfinite_steps_total names it.",
        ),
        false_positives=(
            "A loss that is NaN by convention for batches without labels: do not pass it to "
            "observe(), or mask it.",
        ),
        samples=("stable_operations", "find_the_operation", "check_batch"),
        panels=(panels.LOSS, panels.FIRST_NONFINITE, panels.NONFINITE_RANKS),
    ),
    "MpAgentLossSpike": Guidance(
        harm="Most spikes recover within some hundred steps; a run is lost at those that do not. "
        "Investigate within the hour, and keep the checkpoint from before the spike.",
        query='increase(mp_agent_loss_spike_steps_total{run="RUN"}[15m])',
        reading="The number of steps in the last 15 minutes whose loss was above "
        "mp_agent_loss_spike_bound. Compare mp_agent_loss with mp_agent_loss_median, and with the "
        "gradient norm over the same time.",
        causes=(
            "A batch of unusual data: another language, code, repeated text, a corrupt file.",
            "The learning rate is at its peak, and too high for Adam's second moment to follow.",
            "A gradient norm that exploded some steps earlier.",
            "A resume that lost the optimizer state or the position in the data.",
        ),
        false_positives=(
            "An intended change of the data mixture, the sequence length or the objective.",
            "A very smooth loss, whose ordinary changes are many deviations: raise the threshold. "
            "For noisy losses the bound adapts automatically.",
        ),
        samples=("smaller_learning_rate", "check_batch"),
        panels=(panels.ODD_LOSSES, panels.LOSS, panels.GRADIENT_NORM, panels.LEARNING_RATE),
    ),
    "MpAgentLossDiverging": Guidance(
        harm="Critical: the run has lost what it had learned and does not recover by itself; stop "
        "it, and resume from a checkpoint from before the rise. Warning: the run gets worse with "
        "every step; investigate within the hour.",
        query='mp_agent_loss_trend{run="RUN"}',
        reading="The difference between the median of the last 512 losses and that of the 512 "
        "before, in deviations. Compare mp_agent_loss_median with mp_agent_loss_best, which does "
        "not follow a rise. mp_agent_loss_lost_steps above 0 means that an explosion, non-finite "
        "gradients or a jump of the learning rate raised the loss, that it climbed to twice its "
        "best level or more and stayed, or that it rose slowly to its initial level; it returns to "
        "0 once half of the rise is recovered.",
        causes=(
            "The learning rate is too high: the loss has risen since the end of the warm-up.",
            "An explosion or a spike from which the run did not recover.",
            "Precision: 16-bit weights or optimizer state without an FP32 copy.",
            "The data has changed: a new mixture, wrong labels, an epoch of repeated data.",
        ),
        false_positives=(
            "A curriculum of gradually increasing difficulty, or an objective that rises by design "
            "(adversarial, reinforcement learning): raise loss_growth if it pages. A jump to other "
            "data, and models that are trained in turn, do not page by themselves.",
        ),
        samples=("smaller_learning_rate",),
        panels=(panels.LOSS_TREND, panels.LOSS, panels.LEARNING_RATE),
    ),
    "MpAgentNothingTrained": Guidance(
        harm="No state is damaged, but the run learns nothing and wastes compute. Critical: stop "
        "the run. Warning: investigate within the hour.",
        query='mp_agent_untrained_steps{run="RUN"}',
        reading="The number of consecutive steps in which nothing can have been learned, by "
        "reason.",
        causes=(
            "All labels are masked, so the loss and its gradients are 0.",
            "A NaN loss that the trainer logs, and passes on, as 0.",
            "A schedule that has reached its end while the run continues with learning rate 0.",
            "A detached output or frozen parameters: no gradient reaches the optimizer.",
            "A saturated output, or a model that answers every input alike: the loss is the same "
            "for every batch, as 0.6931 (ln 2) for two classes that are equally frequent.",
            "Weights that are gone: a loss that falls to exactly 0 for good, and a gradient norm "
            "that is the same on every step.",
        ),
        false_positives=(
            "A first parameter group with learning rate 0 on purpose, while the loss no longer "
            "falls.",
            "A small data set that is learned to a loss of exactly 0: stop the run.",
            "Gradients that hooks cannot see: mp_agent_unsupported_info says what is not measured.",
        ),
        samples=("dead_parameters", "check_batch"),
        panels=(panels.LOSS, panels.GRADIENT_NORM, panels.LEARNING_RATE),
    ),
    "MpAgentLearningRateJump": Guidance(
        harm="A learning rate that is ten times too high can undo days of training within some "
        "steps: act within minutes, and keep the last checkpoint.",
        query='increase(mp_agent_learning_rate_jumps_total{run="RUN"}[15m])',
        reading="The number of recent jumps; plot mp_agent_learning_rate to see the values before "
        "and after. If the loss rises at the same time, the jump is the cause.",
        causes=(
            "A schedule in epochs is stepped once per batch, or the other way round.",
            "A resumed run whose schedule or base rate was not restored.",
            "A rate that is scaled by the batch or world size twice.",
        ),
        false_positives=(
            "A warm-up at a constant low rate for more than a hundred steps, then the full rate.",
        ),
        samples=("smaller_learning_rate",),
        panels=(panels.LEARNING_RATE, panels.LOSS, panels.GRADIENT_NORM),
    ),
}


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
