"""Alerts on the course of the loss, and of the learning rate."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import Compare, Count, Series, all_of, limit
from mp_agent.alerting.first_line import Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.remedies import CLIPS_NOT, GoBack, Remedy
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import training

_JUMPS = Count(metric=training.LEARNING_RATE_JUMPS, window=duration("incident_window"))


LEARNING_RATE_JUMP = Condition(
    name="MpAgentLearningRateJump",
    summary="The learning rate has jumped.",
    meaning="Updates are suddenly many times as large as those that the weights were trained "
    "with; the loss often rises within some steps.",
    confirm="Plot mp_agent_learning_rate together with mp_agent_loss and mp_agent_grad_norm.",
    remedies=(
        "Check the schedule: its units (steps or epochs), its base rate, and whether it was "
        "restored with the optimizer.",
        GoBack(
            "If the loss has risen, resume from a checkpoint from before the jump, with the old "
            "rate."
        ),
    ),
    why="A schedule rises smoothly or restarts at an earlier rate; a rate ten times above all "
    "previous ones is nearly always a mistake in its units or its base.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_JUMPS),
            description="The learning rate of run {run} rose to <learning_rate_jump> times its "
            "highest value so far, or more, within the last <incident_window>.",
            reason="No delay: the learning rate is known exactly.",
        ),
    ),
    quiet=("a warm-up, whose rises are not counted",),
    needs=((Quantity.LEARNING_RATE,),),
    knobs=(less_above("learning_rate_jump"),),
    guidance=Guidance(
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
)


_FALLS = Count(metric=training.LEARNING_RATE_FALLS, window=duration("incident_window"))


LEARNING_RATE_FALLEN = Condition(
    name="MpAgentLearningRateFallen",
    summary="The learning rate has collapsed within a few steps.",
    meaning="Since then a step changes the weights by a thousandth of what it did, or less: the "
    "run continues and hardly learns.",
    confirm="Plot mp_agent_learning_rate from the first step on, with mp_agent_loss.",
    remedies=(
        "Check the unit of the schedule: one made for epochs is to be stepped once per epoch, and "
        "one for steps needs their number in this job, not in another.",
        "Start again, or resume from a checkpoint from before the fall, with the schedule and the "
        "rate that were meant.",
    ),
    why="A schedule falls over the length of a run. One that has nearly ended after some steps, "
    "while the run goes on, nearly always counts in another unit than it was made for.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_FALLS),
            description="The learning rate of run {run} has fallen, within 64 steps, to less than "
            "<learning_rate_fall> of what it was, and the run goes on.",
            reason="No delay: the learning rate is known exactly, and stayed so low for 16 steps.",
        ),
    ),
    quiet=("a schedule that ends with the run",),
    needs=((Quantity.LEARNING_RATE,),),
    guidance=Guidance(
        harm="Nothing breaks, but computing time is wasted from here on: look before the run has "
        "gone on for long.",
        query='increase(mp_agent_learning_rate_falls_total{run="RUN"}[15m])',
        reading="The number of such falls; plot mp_agent_learning_rate to see when it fell, and by "
        "which steps.",
        causes=(
            "A schedule for epochs, such as StepLR or ExponentialLR, is stepped after every batch.",
            "The schedule was given the number of steps of another job, of one epoch, or of one "
            "rank's share.",
            "Several schedules, or several calls per step, multiply the rate.",
            "ReduceLROnPlateau is stepped after every batch, and takes the noise of single batches "
            "for a plateau.",
        ),
        false_positives=(
            "Training on the whole data set at once, where a step is an epoch, with a schedule of "
            "less than 64 epochs.",
        ),
        samples=("smaller_learning_rate",),
        panels=(panels.LEARNING_RATE, panels.LOSS),
    ),
)


_TREND = Series(metric=training.LOSS_TREND)
_RISING = Series(metric=training.LOSS_RISING_STEPS)
_LOST = Series(metric=training.LOSS_LOST_STEPS)
_LOST_TEXT = (
    "The loss of run {run} has been far above its best level for {value|count} steps: it has lost "
    "what it had learned, unless a term, a weight or a task of the loss was changed on purpose."
)


LOSS_DIVERGING = Condition(
    name="MpAgentLossDiverging",
    summary="The loss has risen and stays up.",
    meaning="The model is worse than it was, and the compute is wasted.",
    confirm="Plot mp_agent_loss_median and mp_agent_loss_best over the last hours, with "
    "mp_agent_learning_rate and mp_agent_grad_norm; find out what changed when the loss started "
    "to rise.",
    remedies=(
        GoBack(
            "Resume from a checkpoint from before the rise, with a learning rate of a third to a "
            "tenth."
        ),
        "Check what changed at that step: schedule, data mixture, batch size, a resumed optimizer "
        "without its state.",
        "If the loss scale fell or gradients grew at the same time, handle those first.",
    ),
    why="A loss that rises for a thousand steps does not recover by itself: the weights have "
    "left the region where the learning rate is small enough.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="damaged, unless the loss itself was changed on purpose",
                now="unless it was, stop, and resume from {checkpoint}, and from before the loss "
                "rose",
            ),
            when=happened(_LOST),
            keep=duration("diverging_keep"),
            description=_LOST_TEXT,
            reason="No delay: the node agent first counts loss_lost_steps losses, three eighths "
            "of them where the loss clearly stays above twice its best level, independent of the "
            "step time, and the alert lasts until the loss has recovered.",
        ),
        Level(
            severity=Severity.WARNING,
            when=all_of(
                Compare(_TREND, ">", limit("loss_trend_deviations")),
                Compare(_RISING, ">=", limit("loss_rising_steps")),
            ),
            keep=duration("diverging_keep"),
            counted=_RISING,
            description="The loss of run {run} has risen by {value|number} deviations from one "
            "long window to the next.",
            reason="The windows are long; the condition requires loss_rising_steps losses above "
            "the limit, and the alert lasts beyond a return to it.",
        ),
    ),
    quiet=(
        "a loss that falls",
        "a loss that oscillates slowly",
        "a trend that only touches the limit, with slow steps",
        "a run that does not have two long windows yet",
    ),
    follows_from=(
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
        "MpAgentReplicaDivergence",
        "MpAgentNonFiniteUpdate",
        "MpAgentGradientsAddUp",
        "MpAgentSecondMomentStale",
        "MpAgentAttentionLogitGrowth",
        "MpAgentOutputLogitDivergence",
    ),
    needs=((Quantity.LOSS,),),
    usual=Quantity.LOSS,
    knobs=(
        less_above("loss_trend_deviations"),
        less_above("loss_rising_steps"),
        less_above("loss_lost_steps"),
    ),
    guidance=Guidance(
        harm="Critical: the run has lost what it had learned and does not recover by itself; stop "
        "it, and resume from a checkpoint from before the rise. Warning: the run gets worse with "
        "every step; investigate within the hour.",
        query='mp_agent_loss_trend{run="RUN"}',
        reading="The difference between the median of the last 512 losses and that of the 512 "
        "before, in deviations. Compare mp_agent_loss_median with mp_agent_loss_best, which does "
        "not follow a rise. mp_agent_loss_lost_steps above 0 means that an explosion, non-finite "
        "gradients or a jump of the learning rate raised the loss, that it climbed to twice its "
        "best level or more and stayed, or that it rose slowly to its initial level; it returns to "
        "0 once half of the rise is recovered. A rise by itself says nothing of a loss that moves "
        "from step to step by a tenth of its level or more, such as the squared errors of values "
        "that grow, and nothing at all of one that has gone up and down by factors since the run "
        "began, such as a sum over episodes: look at the reward, or at an evaluation.",
        causes=(
            "The learning rate is too high: the loss has risen since the end of the warm-up.",
            "An explosion or a spike from which the run did not recover.",
            "Precision: 16-bit weights or optimizer state without an FP32 copy.",
            "The data has changed: a new mixture, wrong labels, an epoch of repeated data.",
        ),
        false_positives=(
            "A term of the loss whose weight is raised during the run (KL annealing, a consistency "
            "loss), a curriculum of gradually increasing difficulty, or an objective that rises by "
            "design (adversarial, reinforcement learning): raise loss_growth if it pages. A jump "
            "to other data, and models that are trained in turn, do not page by themselves.",
        ),
        samples=("smaller_learning_rate",),
        panels=(panels.LOSS_TREND, panels.LOSS, panels.LEARNING_RATE),
    ),
)


_STEPS = Count(metric=training.LOSS_SPIKE_STEPS, window=duration("loss_spike_window"))


LOSS_SPIKE = Condition(
    name="MpAgentLossSpike",
    summary="The loss has spiked.",
    meaning="An update has set the model back, or the data contains something new; most spikes "
    "are temporary, some end in divergence.",
    confirm="Plot mp_agent_loss together with mp_agent_loss_spike_bound; a spike of the "
    "gradient norm before it indicates an update, one at the same step indicates the data.",
    remedies=(
        "Wait for some hundred steps: if the loss does not recover, resume from a checkpoint "
        "from before the spike, and skip its batches.",
        Remedy("Clip gradients, max norm 1.0 or less.", CLIPS_NOT),
        "Reduce the learning rate if spikes recur.",
        "Check the batches of those steps: duplicates, corrupt records, sequences of one token.",
    ),
    why="A spike comes from an update that is too large, or from an unusual batch; clipping and "
    "a smaller learning rate bound the update, and without the batch the spike does not recur.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_STEPS),
            description="The loss of run {run} was far above its usual level on {value|count} "
            "step(s) within the last <loss_spike_window>.",
            reason="No delay: two of three steps are sufficient evidence, and the counter keeps "
            "them visible for loss_spike_window.",
        ),
    ),
    quiet=(
        "a NaN loss, which never enters the window and is no spike",
        "a single batch with twice the loss, which is not counted",
        "a loss that fluctuates within its own deviations",
    ),
    follows_from=(
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
        "MpAgentReplicaDivergence",
        "MpAgentNonFiniteUpdate",
        "MpAgentSecondMomentStale",
    ),
    needs=((Quantity.LOSS,),),
    usual=Quantity.LOSS,
    knobs=(less_above("loss_spike_deviations", "loss_spike_noisy_deviations"),),
    guidance=Guidance(
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
            "Reinforcement learning: after a new rollout the loss is over other data, and may be "
            "twice as high.",
            "A very smooth loss, whose ordinary changes are many deviations: raise the threshold. "
            "For noisy losses the bound adapts automatically.",
        ),
        samples=("smaller_learning_rate", "check_batch"),
        panels=(panels.ODD_LOSSES, panels.LOSS, panels.GRADIENT_NORM, panels.LEARNING_RATE),
    ),
)


CONDITIONS = (
    LOSS_SPIKE,
    LOSS_DIVERGING,
    LEARNING_RATE_JUMP,
    LEARNING_RATE_FALLEN,
)
