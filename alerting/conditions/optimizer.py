"""Alerts on what the optimizer makes of gradients, and on its state."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened, sustained, sustained_steps
from mp_agent.alerting.conditions.loop import loop_mistake
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import (
    Compare,
    Number,
    Seen,
    Series,
    all_of,
    any_of,
    limit,
    unless,
)
from mp_agent.alerting.first_line import Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import optimizer

_ADAM_EPSILON_UNSAFE_LOST = Series(metric=optimizer.ADAM_EPSILON_LOST)


ADAM_EPSILON_UNSAFE = Condition(
    name="MpAgentAdamEpsilonUnsafe",
    summary="Adam's epsilon does not suit its second moments or their format.",
    meaning="Where the root of the second moment is below epsilon, the update shrinks with the "
    "gradient: Adam becomes plain gradient descent with a tiny learning rate. Where epsilon "
    "is below the smallest number of the state's format it acts as 0, and a second moment that "
    "underflows makes the update infinite.",
    confirm="mp_agent_adam_below_epsilon_ratio and mp_agent_adam_epsilon_lost_ratio.",
    remedies=(
        "For state in FP16: keep weights and state in FP32 and compute by autocast, or keep FP32 "
        "masters; else use an epsilon of 1e-4 or more.",
        "For second moments below epsilon: lower epsilon, with state in FP32, or stop dividing "
        "the loss by large constants.",
    ),
    why="Epsilon is to prevent a division by zero without setting the size of the update: it has "
    "to lie between the format's smallest number and the root of the second moments. The formats "
    "are known from the first step on; the second moments are looked at if the setting "
    "measure_updates is on.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="divided by 0 wherever a second moment rounds to 0, and then NaN or Inf",
                now="stop, and start again with FP32 weights and state, or eps=1e-4",
            ),
            when=Seen(
                Series(metric=optimizer.ZERO_EPSILON, keep=("optimizer", "format", "epsilon"))
            ),
            description="{optimizer} of run {run} keeps its state in {format}, which rounds its "
            "epsilon of {epsilon} to 0: where a second moment rounds to 0 too, the update is NaN "
            "or Inf. Keep weights and state in FP32, or set eps to 1e-4 or more.",
            reason="No delay: it is so from the first step on.",
        ),
        Level(
            severity=Severity.WARNING,
            when=any_of(
                sustained("adam_below_epsilon"),
                Compare(_ADAM_EPSILON_UNSAFE_LOST, ">", Number(0)),
            ),
            description="Adam's epsilon does not suit the second moments of run {run}: it is "
            "either above the root of most of them, or below the smallest number of their format.",
            counted=sustained_steps("adam_below_epsilon"),
            reason="No delay: second moments below epsilon take all samples of sustained_steps "
            "steps, since the first gradients can be tiny.",
        ),
    ),
    quiet=(
        "a minority of elements with tiny second moments, such as of rare tokens",
        "tiny gradients in the first samples",
        "an epsilon of 1e-8 with state in FP32",
    ),
    follows_from=("MpAgentGradientVanishing", "MpAgentNothingTrained"),
    needs=((Quantity.OPTIMIZER,),),
    knobs=(less_above("adam_below_epsilon"),),
    guidance=Guidance(
        harm="Critical: weights become NaN or Inf within the first steps. Warning: updates are far "
        "smaller than intended; look during working hours.",
        query='mp_agent_adam_below_epsilon_ratio{run="RUN"} or '
        'mp_agent_adam_epsilon_lost_ratio{run="RUN"}',
        reading="The first is the share of elements whose second moment is below epsilon; the "
        "second is the share whose state's format cannot hold epsilon, 0 or 1 in most runs.",
        causes=(
            "The optimizer's state is in FP16, because the model was cast by half(): torch gives "
            "the state the format of the weights.",
            "A loss that is divided by a large constant, so that all gradients are tiny.",
            "An epsilon that was raised to stabilize another run.",
        ),
        false_positives=(
            "A large epsilon on purpose, which turns Adam into a damped gradient descent.",
            "A converged run, whose gradients have all become tiny.",
        ),
        samples=("safe_epsilon",),
        panels=(panels.ADAM_EPSILON, panels.GRADIENT_NORM),
    ),
)


_STALE = Series(metric=optimizer.LAYERS_MOMENT_STALE)


SECOND_MOMENT_STALE = Condition(
    name="MpAgentSecondMomentStale",
    summary="Adam's second moments are out of date: updates are too large.",
    meaning="Adam divides each gradient by its usual size of the last 1/(1 - beta2) steps. "
    "Gradients that have grown since are divided by too little, and each update overshoots; a "
    "loss spike often follows within a few steps.",
    confirm="mp_agent_moment_rms_layer_max, and mp_agent_layer_moment_rms of the layers that "
    "mp_agent_moment_stale_layer_info names; mp_agent_update_relative rises with them. A single "
    "jump of the gradients is over after one sample at the default layer_interval: only a growth "
    "that goes on is reported, or a jump where layers are measured at least every 25 steps.",
    remedies=(
        "Lower beta2, for example from 0.999 to 0.95, so that the second moments follow sooner.",
        "Clip updates by this root (AdaFactor, StableAdamW), or clip gradients more tightly.",
        "Check what changed in the data at that step, and shuffle it better.",
    ),
    why="A smaller beta2 shortens the time for which the second moment is out of date; clipping "
    "bounds the update meanwhile. Judged only if the setting measure_updates is on.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_STALE),
            keep=duration("layer_keep"),
            description="In {value|count} layer(s) of run {run}, gradients were more than "
            "<moment_rms_high> times what Adam's second moment expects in the last "
            "<moment_rms_samples> samples.{mp_agent_moment_stale_layer_info| Among them: |layer}",
            reason="No delay: the condition already requires consecutive samples, and a loss "
            "spike can be a few steps away; the alert lasts beyond some samples.",
        ),
    ),
    quiet=("second moments that follow the gradients",),
    follows_from=("MpAgentLearningRateJump", "MpAgentGradientExplosion"),
    needs=((Quantity.OPTIMIZER,),),
    knobs=(less_above("moment_rms_high"), less_above("moment_rms_samples")),
    guidance=Guidance(
        harm="No damage yet, but each update is larger than intended, and the loss may spike "
        "within a few steps. Look during working hours, at once if the loss rises.",
        query='last_over_time(mp_agent_moment_stale_layer_info{run="RUN"}[15m])',
        reading="The layers in which gradients have outgrown the second moment; "
        "mp_agent_layer_moment_rms says by which factor. Values near 1 are healthy.",
        causes=(
            "The data changed: another source, another sequence length, a batch that was not "
            "shuffled.",
            "beta2 is close to 1, such as 0.999, and the gradients' scale drifts faster.",
            "A layer that was nearly idle receives gradients again, such as rare embeddings.",
            "Gradients begin to explode, for which the learning rate is too high.",
        ),
        false_positives=(
            "A schedule that unfreezes layers or changes the loss on purpose: it heals within "
            "about 1/(1 - beta2) steps.",
        ),
        samples=("weights_of_averages",),
        panels=(panels.SECOND_MOMENT, panels.UPDATE_SIZE, panels.LOSS),
    ),
)


_UPDATES_LOST_LOST = Series(metric=optimizer.UPDATES_LOST)
_ROUNDING_LOSS = Series(metric=optimizer.UPDATES_ROUNDING_LOSS)


UPDATES_LOST = Condition(
    name="MpAgentUpdatesLost",
    summary="Most updates of 16-bit weights vanish in rounding.",
    meaning="A weight in BF16 keeps 8 significant bits, in FP16 11: an update of less than about "
    "a 500th, or a 4000th, of the weight leaves it as it was. Learning slows down and stops "
    "as the learning rate decays, although gradients look healthy.",
    confirm="mp_agent_updates_rounding_loss_ratio; with the setting measure_updates also "
    "mp_agent_updates_lost_ratio, mp_agent_layer_updates_lost_ratio by layer, and "
    "mp_agent_update_relative, which shows how small the updates are.",
    remedies=(
        "Keep the weights that the optimizer steps in FP32 (master weights) and compute in 16 "
        "bits by autocast, or by FSDP's MixedPrecisionPolicy.",
        "Round stochastically, or carry the rounding error along (Kahan summation), where memory "
        "does not allow FP32 weights.",
    ),
    why="FP32 weights keep 24 significant bits, so that small updates add up instead of being "
    "lost one by one. Judged by a few elements of each weight that are compared with what they "
    "were nine steps before, and by all of them if the setting measure_updates is on.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=any_of(
                unless(
                    all_of(
                        Compare(_UPDATES_LOST_LOST, ">", limit("updates_lost")),
                        sustained("updates_lost", "updates_lost_steps"),
                    ),
                    # What one step does not change, several do, where the remainder is not lost.
                    Compare(_ROUNDING_LOSS, "<=", limit("updates_lost")),
                ),
                Compare(_ROUNDING_LOSS, ">", limit("updates_lost")),
            ),
            description="{value|percent} of what the optimizer was to change in the 16-bit weights "
            "of run {run} is lost in rounding: the updates are smaller than half the spacing of "
            "the format.",
            counted=sustained_steps("updates_lost"),
            reason="No delay: it takes all samples of updates_lost_steps steps, or two comparisons "
            "in a row, at a learning rate that does not rise.",
        ),
    ),
    quiet=(
        "BF16 weights with stochastic data: half of the updates arrive",
        "stochastic rounding, or a compensated sum, of updates that are small",
        "a warm-up that begins with tiny learning rates",
    ),
    needs=((Quantity.OPTIMIZER,),),
    knobs=(less_above("updates_lost"), less_above("updates_lost_steps")),
    guidance=Guidance(
        harm="The run goes on and learns less than it could, or nothing. Investigate during "
        "working hours; the computing time until then is largely wasted.",
        query='mp_agent_updates_lost_ratio{run="RUN"} or '
        'mp_agent_updates_rounding_loss_ratio{run="RUN"}',
        reading="The share of the weights in at most 16 bits that the last sampled step was to "
        "change and did not; or, of a few elements of each, the share that nine steps were to "
        "change and did not. It grows as the learning rate decays.",
        causes=(
            "The model was cast to BF16 or FP16 as a whole, so that the optimizer steps 16-bit "
            "weights without an FP32 copy.",
            "The learning rate is small for the spacing of the weights' format.",
        ),
        false_positives=(
            "The last steps of a schedule, whose learning rate is almost 0.",
            "With measure_updates, an optimizer that carries the rounding error along, where too "
            "little changes in nine steps to compare the weights.",
        ),
        samples=("master_weights",),
        panels=(panels.ROUNDED_UPDATES, panels.UPDATE_SIZE, panels.LEARNING_RATE),
    ),
)


OPTIMIZER_STATE_LOST = Condition(
    name="MpAgentOptimizerStateLost",
    summary="The optimizer has lost its state: after a checkpoint, or at every step.",
    meaning="The schedule of the learning rate, or the trainer, goes on from a step far from the "
    "first, and the optimizer began with empty state. Momentum and second moments start from 0: "
    "at the learning rate that the run had reached, the first updates are not those that it "
    "would have made, and the loss may rise for some hundred steps. Or the loop makes a new "
    "optimizer for each step: there is no momentum then, and Adam moves every weight by the "
    "learning rate, whatever the size of its gradient.",
    confirm="mp_agent_resumed_without_state_steps. In the script, print len(optimizer.state) after "
    "the checkpoint is loaded.",
    remedies=(
        "Save optimizer.state_dict() with the weights, and load it before the first step; of "
        "sharded optimizers all shards (torch.distributed.checkpoint).",
        "With Transformers, see that the checkpoint has optimizer.pt: save_only_model leaves it "
        "out, and the trainer then resumes without it.",
        "If the state is gone, warm the learning rate up again.",
        "Make the optimizer once, before the loop.",
    ),
    why="Weights alone do not make a checkpoint: nothing fails when the rest is missing.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(
                Series(metric=optimizer.RESUMED_WITHOUT_STATE), ">", limit("resumed_steps")
            ),
            description="Run {run} goes on after {value|count} steps, and its optimizer, which "
            "keeps state, began without any.",
            reason="No delay: it is known at the fourth step, or after 32 steps without state, and "
            "each step makes new state.",
        ),
    ),
    quiet=("a run that resumes with the state of its optimizer, or begins at step 1",),
    needs=((Quantity.OPTIMIZER,),),
    guidance=Guidance(
        harm="The run goes on and may need some hundred steps to recover. Stop it soon if the "
        "state is there to be loaded.",
        query='mp_agent_resumed_without_state_steps{run="RUN"}',
        reading="The steps that were made before this attempt's first one, for 1000 steps, in "
        "which new state is made. A multiple of 32 that grows: the steps that began without state.",
        causes=(
            "A checkpoint of the weights and the schedule alone.",
            "The optimizer is made again after its state was loaded, or within the loop.",
            "A trainer that leaves out what is missing in the checkpoint.",
        ),
        false_positives=(
            "State that is discarded on purpose at a restart, while the schedule goes on.",
        ),
        samples=("weights_of_averages",),
        panels=(panels.UPDATE_SIZE, panels.LOSS),
    ),
)


SCHEDULE_BEGUN_AGAIN = Condition(
    name="MpAgentScheduleBegunAgain",
    summary="After a restart the schedule of the learning rate is at its first step again.",
    meaning="The optimizer goes on with the state of a checkpoint, and the schedule does not: the "
    "learning rate is again that of the beginning, after its warm-up the highest of all, and falls "
    "as late as it would in a new run. The loss rises at first, and the run may end far above its "
    "last learning rate.",
    confirm="mp_agent_schedule_behind_steps, and mp_agent_learning_rate before and after the "
    "restart. In the script, print scheduler.last_epoch after the checkpoint is loaded.",
    remedies=(
        "Save scheduler.state_dict() with the optimizer's, and load it after the scheduler is "
        "made: making one sets the learning rate to its first.",
        "Or pass the number of steps made so far: last_epoch=steps - 1.",
    ),
    why="optimizer.load_state_dict restores the last learning rate, which a new scheduler "
    "overwrites.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(Series(metric=optimizer.SCHEDULE_BEHIND), ">", limit("resumed_steps")),
            description="The optimizer of run {run} goes on with the state of {value|count} steps "
            "that its schedule of the learning rate has not counted.",
            reason="No delay: it is known at the fourth step.",
        ),
    ),
    quiet=("a schedule that goes on, or a run that begins at step 1",),
    needs=((Quantity.OPTIMIZER,),),
    guidance=Guidance(
        harm="Each step at a learning rate that is too high undoes some of what was learned. Stop "
        "the run soon if its schedule was to go on.",
        query='mp_agent_schedule_behind_steps{run="RUN"}',
        reading="The steps of the optimizer before this attempt's first one that the schedule has "
        "not counted, for 1000 steps.",
        causes=(
            "A checkpoint of the weights and the optimizer, without the scheduler.",
            "A scheduler that is made after its state was loaded, or whose state is not loaded.",
        ),
        false_positives=(
            "A schedule that begins again on purpose, as for more training, or another phase, with "
            "the optimizer's state of before.",
        ),
        samples=("save_and_resume",),
        panels=(panels.LEARNING_RATE, panels.LOSS),
    ),
)


BETAS_SWAPPED = loop_mistake(
    "betas swapped",
    name="MpAgentBetasSwapped",
    summary="Adam's betas are in the wrong order: the first is greater than the second.",
    meaning="The mean of the gradients then outlives the mean of their squares: after a large "
    "gradient the divisor is small again while the mean still points its way, and the updates "
    "that follow are far too large. Such settings are outside of what Adam is known to converge "
    "for.",
    confirm="Print optimizer.param_groups[0]['betas'].",
    remedies=("Pass the smaller one first: betas=(0.9, 0.999).",),
    why="betas are (decay of the mean, decay of the mean square), in this order.",
    description="Run {run} has made {value|count} consecutive steps with a first beta that is "
    "greater than the second.",
    quiet="a few steps with such betas",
    harm="The run learns worse than it could, and may diverge after a large gradient. Correct it, "
    "and start again, within the hour.",
    reading="The number of consecutive steps with such betas.",
    causes=(
        "A configuration that has them in the other order.",
        "beta1 and beta2 that were passed by position.",
    ),
    false_positives=("An optimizer of one's own that keeps something else as betas.",),
    samples=("weights_of_averages",),
    panels=(panels.UPDATE_SIZE, panels.LOSS),
)


CONDITIONS = (
    OPTIMIZER_STATE_LOST,
    SCHEDULE_BEGUN_AGAIN,
    SECOND_MOMENT_STALE,
    UPDATES_LOST,
    ADAM_EPSILON_UNSAFE,
    BETAS_SWAPPED,
)
