"""Runbook texts: the loss."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

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
