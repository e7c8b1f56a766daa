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
            "A very smooth loss, whose ordinary jumps are many deviations: raise the threshold.",
        ),
        samples=("smaller_learning_rate", "check_batch"),
        panels=(panels.ODD_LOSSES, panels.LOSS, panels.GRADIENT_NORM, panels.LEARNING_RATE),
    ),
    "MpAgentLossDiverging": Guidance(
        harm="The run gets worse with every step; what it makes now will be thrown away. Look "
        "within the hour.",
        query='mp_agent_loss_trend{run="RUN"}',
        reading="By how many deviations the median of the last 512 losses lies above that of the "
        "512 before. Compare mp_agent_loss_median with an hour ago, and with its lowest.",
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
}
