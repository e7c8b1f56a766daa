"""Runbook texts: the loss."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

LOSS = {
    "MpAgentLossNonFinite": Guidance(
        harm="Without a scaler the update of that step has destroyed the weights: stop the run. "
        "With one the step was skipped; three in a row mean that it will not pass by itself.",
        query='mp_agent_loss_nonfinite_steps_total{run="RUN"} > 0',
        reading="How many steps had such a loss. If mp_agent_skipped_steps_total grew as much, the "
        "weights are untouched so far.",
        causes=(
            "An overflow in FP16: softmax, exp, pow, a variance or a large sum left 65 504.",
            "log(0) or a division by zero: binary_cross_entropy after a sigmoid, a masked mean "
            "over no tokens, a norm of a zero vector.",
            "Weights that an earlier explosion has driven away: look at the gradient norm before.",
            "Broken data on one rank: mp_agent_rank_loss_nonfinite_steps_total names it.",
        ),
        false_positives=(
            "A loss that is NaN by agreement, for batches without labels: leave it out of "
            "observe(), or mask it.",
        ),
        samples=("stable_operations", "find_the_operation", "check_batch"),
        panels=(panels.LOSS, panels.FIRST_NONFINITE, panels.NONFINITE_RANKS),
    ),
    "MpAgentLossSpike": Guidance(
        harm="Most spikes heal within some hundred steps; those that do not are where a run is "
        "lost. Look within the hour, and keep the checkpoint from before the spike.",
        query='increase(mp_agent_loss_spike_steps_total{run="RUN"}[15m])',
        reading="On how many steps of the last quarter of an hour the loss was above "
        "mp_agent_loss_spike_bound. Compare mp_agent_loss with mp_agent_loss_median, and with the "
        "gradient norm of the same minutes.",
        causes=(
            "A batch of unusual data: another language, code, repeated text, a broken file.",
            "The learning rate is at its peak, and too high for Adam's second moment to follow.",
            "A norm that exploded some steps earlier.",
            "A resume that lost the optimizer state or the place in the data.",
        ),
        false_positives=(
            "A change of the data mixture, the sequence length or the objective on purpose.",
            "A very smooth loss, whose ordinary jumps are many deviations: raise the threshold. Of "
            "noisy losses the bound is higher by itself.",
        ),
        samples=("smaller_learning_rate", "check_batch"),
        panels=(panels.ODD_LOSSES, panels.LOSS, panels.GRADIENT_NORM, panels.LEARNING_RATE),
    ),
    "MpAgentLossDiverging": Guidance(
        harm="Critical: what the run had learned is lost and will not come back by itself; stop "
        "it, and resume from a checkpoint from before the rise. Warning: the run gets worse with "
        "every step; look within the hour.",
        query='mp_agent_loss_trend{run="RUN"}',
        reading="By how many deviations the median of the last 512 losses lies above that of the "
        "512 before. Compare mp_agent_loss_median with mp_agent_loss_best, which does not follow. "
        "mp_agent_loss_lost_steps above 0 says that an explosion, non-finite gradients or a jump "
        "of the learning rate threw it back, or that it has crept up to where it had begun; it "
        "goes back to 0 once half of that is made good.",
        causes=(
            "The learning rate is too high: the loss rises since the warm-up's end.",
            "An explosion or a spike from which the run did not recover.",
            "Precision: 16-bit weights or optimizer state without an FP32 copy.",
            "The data has changed: a new mixture, labels that are wrong, an epoch of repeats.",
        ),
        false_positives=(
            "A curriculum that grows harder, or an objective that is meant to rise (adversarial, "
            "reinforcement learning).",
        ),
        samples=("smaller_learning_rate",),
        panels=(panels.LOSS_TREND, panels.LOSS, panels.LEARNING_RATE),
    ),
    "MpAgentNothingTrained": Guidance(
        harm="Nothing is destroyed, but nothing is learned: every hour is spent in vain. Critical: "
        "stop the run. Warning: look within the hour.",
        query='mp_agent_untrained_steps{run="RUN"}',
        reading="For how many steps in a row nothing can have been learned, by reason.",
        causes=(
            "Labels that are all masked, so that the loss and its gradients are 0.",
            "A NaN loss that the trainer logs, and passes on, as 0.",
            "A schedule that has reached its end while the run goes on with learning rate 0.",
            "A detached output or frozen parameters: no gradient reaches the optimizer.",
            "A saturated output, whose loss is the same for every batch.",
        ),
        false_positives=(
            "A first parameter group with learning rate 0 on purpose, while the loss does not "
            "fall any more.",
            "Gradients that hooks cannot see: mp_agent_unsupported_info says what is not measured.",
        ),
        samples=("dead_parameters", "check_batch"),
        panels=(panels.LOSS, panels.GRADIENT_NORM, panels.LEARNING_RATE),
    ),
    "MpAgentLearningRateJump": Guidance(
        harm="A rate ten times too high can undo days of training within some steps: look within "
        "minutes, and keep the last checkpoint.",
        query='increase(mp_agent_learning_rate_jumps_total{run="RUN"}[15m])',
        reading="How often the rate jumped lately; plot mp_agent_learning_rate to see from what to "
        "what. A jump together with a rising loss is the cause of that rise.",
        causes=(
            "A schedule that counts epochs is stepped once per batch, or the other way round.",
            "A resumed run whose schedule or base rate was not restored.",
            "A rate that is scaled by the batch or world size twice.",
        ),
        false_positives=(
            "A constant low rate as warm-up for more than a hundred steps, then the full rate.",
        ),
        samples=("smaller_learning_rate",),
        panels=(panels.LEARNING_RATE, panels.LOSS, panels.GRADIENT_NORM),
    ),
}
