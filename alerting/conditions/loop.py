"""Alerts on the order of a training loop's calls."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.expressions import Compare, Series, Where, limit
from mp_agent.alerting.panels import Guidance, Panel
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import training


def loop_mistake(
    mistake: str,
    *,
    name: str,
    summary: str,
    meaning: str,
    confirm: str,
    remedies: tuple[str, ...],
    why: str,
    description: str,
    quiet: str,
    harm: str,
    reading: str,
    causes: tuple[str, ...],
    false_positives: tuple[str, ...],
    samples: tuple[str, ...],
    panels: tuple[Panel, ...],
    threshold: str = "loop_mistake_steps",
) -> Condition:
    """Return the warning of a mistake that is made on so many steps in a row."""
    steps = Series(metric=training.LOOP_MISTAKE_STEPS, where=(Where("mistake", "=", mistake),))
    return Condition(
        name=name,
        summary=summary,
        meaning=meaning,
        confirm=confirm,
        remedies=remedies,
        why=why,
        levels=(
            Level(
                severity=Severity.WARNING,
                when=Compare(steps, ">=", limit(threshold)),
                counts_steps=True,
                description=description,
                reason=f"No delay: the condition already requires {threshold} consecutive steps, "
                "which a loop that does so now and then does not reach.",
            ),
        ),
        quiet=(quiet,),
        needs=((Quantity.LOOP,),),
        knobs=(less_above(threshold),),
        guidance=Guidance(
            harm=harm,
            query=f'mp_agent_loop_mistake_steps{{run="RUN",mistake="{mistake}"}}',
            reading=reading,
            causes=causes,
            false_positives=false_positives,
            samples=samples,
            panels=panels,
        ),
    )


GRADIENTS_ADD_UP = loop_mistake(
    "gradients add up",
    name="MpAgentGradientsAddUp",
    summary="Gradients are not cleared between steps: each step uses those of all before again.",
    meaning="backward() adds to the gradients that are there. Each step goes along the sum of all "
    "gradients since they were last cleared, as with a momentum that never decays: the norm "
    "grows, and the loss falls at first and rises again, or never falls as far as it could.",
    confirm="Print the norm of the gradients just before backward(): it is not 0. In most such "
    "runs mp_agent_grad_norm grows from step to step.",
    remedies=(
        "Call optimizer.zero_grad() once per step: before the first backward() of the step, or "
        "right after optimizer.step(), and within the closure where there is one.",
        "With several optimizers, clear the gradients of each, or those of the whole model by "
        "model.zero_grad().",
    ),
    why="A step is to use the gradients of its own batch alone. Restart from a checkpoint of "
    "before the mistake: the weights since then were moved along stale gradients.",
    description="On {value|count} consecutive steps, an optimizer of run {run} used the gradients "
    "of its step before again: they were not cleared before the next backward added to them.",
    quiet="a few steps with gradients that were used before",
    harm="The run trains with wrong gradients from the first of these steps on. Stop it within "
    "the hour, and fix the loop.",
    reading="The number of consecutive steps that used gradients again.",
    causes=(
        "zero_grad is missing in the loop, or is called before the loop only.",
        "zero_grad of another optimizer, or of another model, than the one that steps.",
        "model.zero_grad() where the optimizer also holds parameters outside of the model, such as "
        "those of the loss.",
        "zero_grad in a branch that is not taken, as on a condition about accumulation.",
        "A closure, as L-BFGS needs it, without zero_grad.",
    ),
    false_positives=(
        "An algorithm that adds up gradients over all steps on purpose, as dual averaging may: "
        "raise loop_mistake_steps for it.",
    ),
    samples=("order_of_the_loop",),
    panels=(panels.GRADIENT_NORM, panels.LOSS),
)


GRADIENTS_DISCARDED = loop_mistake(
    "gradients discarded",
    name="MpAgentGradientsDiscarded",
    summary="Gradients of whole backwards are cleared before any step has used them.",
    meaning="Of the micro-batches of a step only the last ones count: the batch is smaller than "
    "it looks, the gradients are noisier and, where each loss is divided by the number of "
    "micro-batches, too small; the others were computed for nothing.",
    confirm="mp_agent_loop_discarded_backwards is how many backwards before the last step were of "
    "no use; add the ones that it used, and compare with the micro-batches of a step.",
    remedies=(
        "Call optimizer.zero_grad() once per step, outside of the loop over micro-batches: right "
        "after optimizer.step(), or before the first backward() of the step.",
    ),
    why="Gradient accumulation relies on backward() adding to the gradients of the micro-batches "
    "before; zero_grad in between discards them.",
    description="On {value|count} consecutive steps of run {run}, gradients of whole backwards "
    "were cleared before any optimizer used them. The same line of code made those that were "
    "used.",
    quiet="a bad batch that is skipped now and then",
    harm="No state is damaged; the run trains on a part of its data, and wastes the time of the "
    "rest. Investigate within the hour.",
    reading="The number of consecutive steps before which gradients were discarded.",
    causes=(
        "zero_grad at every micro-batch, while the optimizer steps after several.",
        "zero_grad at the end of the loop's body rather than where the optimizer steps.",
    ),
    false_positives=(
        "An algorithm that takes gradients of several losses by one line of code, reads them, and "
        "clears all but the last: raise loop_mistake_steps for it.",
    ),
    samples=("order_of_the_loop",),
    panels=(panels.GRADIENT_NORM, panels.LOSS),
)


CLIPPING_AFTER_STEP = loop_mistake(
    "clipping after the step",
    name="MpAgentClippingAfterStep",
    summary="Gradients are clipped after the step that has used them: clipping has no effect.",
    meaning="The optimizer uses gradients as large as they come, as if there were no clipping: "
    "one bad batch can destroy the weights.",
    confirm="mp_agent_clip_coefficient is absent, since such clipping is not counted as clipping; "
    "in the loop, clip_grad_norm_ follows optimizer.step().",
    remedies=(
        "Move the call that clips to between the last backward() and optimizer.step(); with a "
        "GradScaler, to between scaler.unscale_(optimizer) and scaler.step(optimizer).",
    ),
    why="Clipping changes the gradients in place: only a step that comes after it uses them.",
    description="On {value|count} consecutive steps, run {run} clipped gradients that its step "
    "had used already.",
    quiet="clipping after a step now and then",
    harm="No state is damaged yet, but nothing limits the gradients. Fix the loop before the next "
    "start.",
    reading="The number of consecutive steps before which gradients were clipped too late.",
    causes=("clip_grad_norm_ stands below optimizer.step(), or in a hook that runs after it.",),
    false_positives=(
        "A call with a limit that is never reached, only to log the norm; one without a limit "
        "(infinity) does not count.",
    ),
    samples=("order_of_the_loop",),
    panels=(panels.CLIPPING, panels.GRADIENT_NORM),
)


CLIPPING_WITHOUT_GRADIENTS = loop_mistake(
    "clipping without gradients",
    name="MpAgentClippingWithoutGradients",
    summary="Clipping finds no gradients: it has no effect.",
    meaning="The optimizer uses gradients as large as they come, as if there were no clipping: "
    "one bad batch can destroy the weights.",
    confirm="Print what clip_grad_norm_ returns: it is 0 on every step. mp_agent_clip_coefficient "
    "is absent or 1.",
    remedies=(
        "Call it between the last backward() and optimizer.step().",
        "Give it model.parameters(), called again each time, or a list of them: an iterator that "
        "was kept in a variable is empty from its second use on.",
    ),
    why="Clipping changes the gradients that are there when it is called, of the parameters that "
    "it is given.",
    description="On {value|count} consecutive steps, no clipping of run {run} was given a "
    "parameter that had a gradient.",
    quiet="a few steps whose clipping finds nothing",
    harm="No state is damaged yet, but nothing limits the gradients. Fix the loop before the next "
    "start.",
    reading="The number of consecutive steps whose clipping found no gradients.",
    causes=(
        "clip_grad_norm_ before backward(), or after optimizer.zero_grad().",
        "parameters = model.parameters() is kept, and was used up by the optimizer or by the "
        "first step.",
        "The parameters of another model, such as one that was copied or wrapped since.",
    ),
    false_positives=("A step that trains nothing of what is clipped, for many steps in a row.",),
    samples=("order_of_the_loop",),
    panels=(panels.CLIPPING, panels.GRADIENT_NORM),
)


CLIPPING_ONE_BY_ONE = loop_mistake(
    "clipping one by one",
    name="MpAgentClippingOneByOne",
    summary="The gradient of each parameter is clipped by its own norm, not by that of all.",
    meaning="Each is scaled by another factor, so that the step goes in another direction than the "
    "gradient: large layers are held back, and small ones are not. The norm of all may still be "
    "the limit times the square root of the number of parameters.",
    confirm="Look for clip_grad_norm_ in a loop over parameters. mp_agent_grad_norm after clipping "
    "is above the limit.",
    remedies=(
        "Call it once per step with all of them: clip_grad_norm_(model.parameters(), max_norm).",
    ),
    why="clip_grad_norm_ computes one norm of all that it is given, and scales all by one factor.",
    description="On {value|count} consecutive steps, run {run} clipped four parameters or more, "
    "each by the norm of its own gradient, and none together.",
    quiet="a few steps that clip so",
    harm="The run trains, with other steps than the limit suggests. Correct it with the next "
    "restart; the learning rate may have been chosen for it.",
    reading="The number of consecutive steps that clipped so.",
    causes=("for parameter in model.parameters(): clip_grad_norm_(parameter, max_norm).",),
    false_positives=("Clipping per parameter on purpose: raise loop_mistake_steps for it.",),
    samples=("order_of_the_loop",),
    panels=(panels.CLIPPING, panels.GRADIENT_NORM),
)


CLIPPING_BY_SHARD = loop_mistake(
    "clipping by shard",
    name="MpAgentClippingByShard",
    summary="Each rank clips its shards by their own norm, which is not that of the model.",
    meaning="Each rank finds a smaller norm than that of all gradients, about the square root of "
    "the number of ranks below it, and another one: the limit is too loose by that factor, and "
    "shards of one tensor are scaled differently, so that the step goes in another direction.",
    confirm="Print what the clipping returns on each rank: the numbers differ, and are below "
    "mp_agent_grad_norm.",
    remedies=(
        "Under FullyShardedDataParallel call model.clip_grad_norm_(max_norm), on all ranks.",
        "By hand, add up the squares of the shards' norms over the ranks that share the model, "
        "and pass the root to torch.nn.utils.clip_grads_with_norm_.",
    ),
    why="torch.nn.utils.clip_grad_norm_ takes plain tensors for the whole; only of DTensors does "
    "it know that they are shards.",
    description="On {value|count} consecutive steps of run {run}, a rank that has shards of the "
    "gradients clipped them by a norm that is that of its own shards alone.",
    quiet="a few steps whose norm is that of one rank's shards",
    harm="The run trains, with a limit that changes with the number of ranks. Correct it with the "
    "next restart.",
    reading="The number of consecutive steps that clipped so.",
    causes=(
        "torch.nn.utils.clip_grad_norm_ of the parameters of a FullyShardedDataParallel model.",
        "Shards that the script makes itself, each clipped on its rank.",
    ),
    false_positives=("Shards of which only one rank's have gradients, for many steps in a row.",),
    samples=("order_of_the_loop",),
    panels=(panels.CLIPPING, panels.GRADIENT_NORM),
)


STEP_REPEATED = loop_mistake(
    "step repeated",
    name="MpAgentStepRepeated",
    summary="The optimizer steps again with gradients that its step before has used.",
    meaning="There is no backward in between, so the weights move twice, or more often, along the "
    "same gradients: as with a multiple of the learning rate, and with momentum and second "
    "moments that count every batch several times. Schedules and counters that go by optimizer "
    "steps run ahead of the data, and mp_agent_steps_total counts each of these steps.",
    confirm="Count the calls of optimizer.step() and of backward() in one iteration of the loop. "
    "mp_agent_loss is absent on steps without a backward.",
    remedies=(
        "Call optimizer.step() once after the backwards of a step. Look for a second call in a "
        "callback, a hook or a helper that steps as well, such as scaler.step(optimizer), "
        "accelerator or trainer.",
        "Call optimizer.zero_grad() right after optimizer.step(): a second step then finds no "
        "gradients, and changes nothing.",
    ),
    why="step() uses the gradients that are there, whether they are new or not.",
    description="On {value|count} consecutive steps of run {run}, an optimizer stepped again, or "
    "had just done so, with gradients that its step before had used: there was no backward in "
    "between.",
    quiet="a step that is repeated now and then",
    harm="No state is damaged, but the run trains with another learning rate and momentum than it "
    "was given. Fix the loop within the hour, and go on from a checkpoint of before the first "
    "such step.",
    reading="The number of consecutive steps of which at least every second used gradients again.",
    causes=(
        "optimizer.step() both in the loop and in a callback, a hook or a helper.",
        "scaler.step(optimizer) followed by optimizer.step().",
        "optimizer.step() in a loop over parameter groups, models or losses that share one "
        "optimizer.",
    ),
    false_positives=(
        "A line search by hand that steps, restores the weights, and steps again with another "
        "learning rate: raise loop_mistake_steps for it.",
    ),
    samples=("order_of_the_loop",),
    panels=(panels.LEARNING_RATE, panels.LOSS),
)


GRADIENTS_LEFT_SCALED = loop_mistake(
    "scaled gradients",
    name="MpAgentGradientsLeftScaled",
    summary="An optimizer steps with gradients that are still multiplied by the loss scale.",
    meaning="GradScaler multiplies the loss, by 65536 at first, and its step() divides the "
    "gradients again. Where optimizer.step() is called instead, the step uses gradients that are "
    "so many times too large: SGD destroys the weights, clipping makes every step one of the "
    "limit's length, and Adam hides it but for its epsilon. Overflows are not skipped.",
    confirm="mp_agent_grad_norm is tens of thousands of times what the loss lets expect; in the "
    "loop, scaler.scale(loss).backward() is followed by optimizer.step().",
    remedies=(
        "Call scaler.step(optimizer) in place of optimizer.step(), for each of several "
        "optimizers, and scaler.update() once after the last of them.",
        "Call scaler.unscale_(optimizer) before anything that reads or clips the gradients.",
        "Under BF16 no loss scale is needed: leave the scaler out, or create it with "
        "enabled=False.",
    ),
    why="The gradients of a scaled loss have to be divided by the scale before they are used.",
    description="On {value|count} consecutive steps, an optimizer of run {run} used gradients of "
    "a scaled loss that nothing had unscaled.",
    quiet="a few steps with scaled gradients",
    harm="The run trains with wrong gradients from the first of these steps on. Stop it within "
    "the hour, and fix the loop.",
    reading="The number of consecutive steps that used gradients which were still scaled.",
    causes=(
        "optimizer.step() where scaler.step(optimizer) was meant.",
        "Several optimizers of which only the first is stepped by the scaler.",
        "A library or a wrapper that steps the optimizer by itself.",
    ),
    false_positives=(
        "Gradients that are unscaled by hand, through grad.data, of an optimizer that is not the "
        "first: not seen.",
    ),
    samples=("order_of_the_loop",),
    panels=(panels.GRADIENT_NORM, panels.LOSS_SCALE),
)


OPTIMIZER_NEVER_STEPS = loop_mistake(
    "optimizer never steps",
    name="MpAgentOptimizerNeverSteps",
    summary="An optimizer has never stepped, although gradients are made for it.",
    meaning="The weights that it holds stay as they were made: that part of the model, or all of "
    "it, is not trained. The loss may fall all the same, where other optimizers step.",
    confirm="Look for step() of each optimizer in the loop. Weights of that part are the same in "
    "two checkpoints.",
    remedies=(
        "Call step() of the optimizer after its backward; with a GradScaler, "
        "scaler.step(optimizer).",
        "Where that part is not to be trained, freeze it by requires_grad_(False): its gradients "
        "then cost nothing.",
    ),
    why="backward() makes gradients, and zero_grad() clears them; step() alone changes weights.",
    description="Over {value|count} steps of run {run}, or as many backwards and more if it makes "
    "no step at all, gradients were made for an optimizer that has not stepped once.",
    quiet="an optimizer that begins to step a little later than another",
    harm="No state is damaged, but what was computed since is lost for that part of the model. "
    "Fix the loop, and start again, within the hour.",
    reading="The number of steps of the run, or 64 of a run without any, for which it has not "
    "stepped.",
    causes=(
        "step() of one of several optimizers is missing: of the discriminator, the critic, the "
        "embeddings.",
        "step() in a branch that is not taken, or of another optimizer than the one that holds "
        "the weights.",
        "A helper makes another optimizer of the same weights, and that one is stepped.",
    ),
    false_positives=(
        "A phase at the beginning in which only another part is trained, and gradients of this "
        "one are made all the same: raise loop_mistake_steps for it, or freeze it.",
    ),
    samples=("order_of_the_loop",),
    panels=(panels.LEARNING_RATE, panels.LOSS),
)


ACCUMULATION_BYPASSED = loop_mistake(
    "accumulation bypassed",
    name="MpAgentAccumulationBypassed",
    summary="An optimizer steps before the micro-batches that losses are divided by are added up.",
    meaning="accelerate's backward divides each loss by gradient_accumulation_steps, and steps are "
    "made after fewer micro-batches. The batch is smaller than was set, gradients are too small by "
    "the same factor, and with several ranks those of all but the last micro-batch may not be "
    "reduced.",
    confirm="Count the calls of backward() between two calls of optimizer.step() that step, and "
    "compare with accelerator.gradient_accumulation_steps.",
    remedies=(
        "Run the body of the loop within `with accelerator.accumulate(model):`.",
        "Step the optimizer that accelerator.prepare returns, not the one that it was given: only "
        "that one waits for the last micro-batch. The same holds for zero_grad and the scheduler.",
        "Where no accumulation is meant, leave gradient_accumulation_steps at 1.",
    ),
    why="Within accumulate, the prepared optimizer waits for the last backward of a step; outside, "
    "each backward is the last.",
    description="On {value|count} consecutive steps, an optimizer of run {run} stepped after fewer "
    "micro-batches than gradient_accumulation_steps, by which each loss is divided.",
    quiet="the end of the data, where fewer micro-batches are left",
    harm="The run trains with a smaller batch and smaller gradients than its settings say. Correct "
    "it with the next restart; learning rates and schedules were chosen for the larger batch.",
    reading="The number of consecutive steps after too few micro-batches.",
    causes=(
        "backward() and step() outside of accelerator.accumulate.",
        "An optimizer that was not given to prepare, or the one within the prepared one.",
    ),
    false_positives=(
        "A loop that steps more often than it says on purpose: raise loop_mistake_steps for it.",
    ),
    samples=("order_of_the_loop",),
    panels=(panels.GRADIENT_NORM, panels.LOSS),
)

CONDITIONS = (
    GRADIENTS_ADD_UP,
    GRADIENTS_DISCARDED,
    CLIPPING_AFTER_STEP,
    CLIPPING_WITHOUT_GRADIENTS,
    CLIPPING_ONE_BY_ONE,
    CLIPPING_BY_SHARD,
    STEP_REPEATED,
    GRADIENTS_LEFT_SCALED,
    ACCUMULATION_BYPASSED,
    OPTIMIZER_NEVER_STEPS,
)
