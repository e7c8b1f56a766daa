"""Alerts on NaN and Inf: in gradients, updates, losses, activations, and on one rank."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import FIRST_NONFINITE, happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import Compare, Count, Seen, Series, Where, all_of, limit, unless
from mp_agent.alerting.first_line import (
    NAN_UPDATE_CAUSES,
    NAN_WRITTEN,
    NO_NAN_COUNTED,
    ROLL_BACK,
    UPDATED,
    Triage,
)
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.remedies import GoBack
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import activations, gradient_layers, gradients, run, training

NONFINITE_REMEDIES = (
    "Replay the step with torch.autograd.set_detect_anomaly to find the operation.",
    "Use binary_cross_entropy_with_logits instead of binary_cross_entropy, and FP32 for "
    "softmax, norms, exp, log, pow and large sums.",
    "If only one rank is named, check its data, then its hardware (XID, ECC).",
)
WHY_NONFINITE_ENDS = (
    "NaN and Inf come from an overflow, a division by zero or a logarithm of zero, mostly in "
    "the few operations whose results leave FP16's range; FP32 or the fused form avoids that."
)


_NONFINITE_GRADIENTS_STEPS = Count(
    metric=training.GRAD_NONFINITE_REPEATED, window=duration("incident_window")
)

_REPLACED = Count(metric=training.GRAD_NONFINITE_REPLACED, window=duration("incident_window"))


GRADIENT_NONFINITE = Condition(
    name="MpAgentGradientNonFinite",
    summary="Gradients are NaN or Inf repeatedly.",
    meaning="The trainer skips every step without lowering a loss scale: the weights do not "
    "change; in published runs the loss diverged hundreds of steps later. Or it replaces NaN and "
    "Inf before the update: the layers concerned then train on zeros.",
    confirm="mp_agent_grad_finite stays at 0; mp_agent_first_nonfinite_info names step, layer "
    "and, if there is evidence, rank. With measure_activations, "
    "mp_agent_activation_first_nonfinite_gradient_info names the module in whose backward it "
    "arose.",
    remedies=(
        "Stop the run, and resume from its last checkpoint once the cause is fixed.",
        *NONFINITE_REMEDIES,
    ),
    why=WHY_NONFINITE_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="intact so far, since the trainer skips these steps",
                now="stop, and find the operation, since no step trains the model",
                updated=UPDATED,
            ),
            when=happened(_NONFINITE_GRADIENTS_STEPS),
            description="The gradients of run {run} were NaN or Inf on <nonfinite_gradients> "
            "consecutive steps, and on {value|count} step(s) since then within the last "
            "<incident_window>." + FIRST_NONFINITE,
            reason="No delay: the condition already requires consecutive steps. Steps on which "
            "a scaler lowers its scale are excluded, and so are updates, which "
            "MpAgentNonFiniteUpdate covers.",
        ),
        Level(
            severity=Severity.WARNING,
            when=Compare(_REPLACED, ">=", limit("nonfinite_gradients")),
            description="{value|count} update(s) of run {run} within the last <incident_window> "
            "used finite gradients in place of NaN or Inf that backward had made."
            + FIRST_NONFINITE,
            reason="No delay: the condition already requires several such steps.",
        ),
    ),
    quiet=(
        "isolated non-finite gradients, as in many healthy runs",
        "a single update with replaced gradients",
    ),
    follows_from=(
        "MpAgentRankNonFinite",
        "MpAgentNonFiniteUpdate",
        "MpAgentActivationNonFinite",
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
    ),
    needs=((Quantity.GRAD_NORM,),),
    knobs=(less_above("nonfinite_gradients"),),
    guidance=Guidance(
        harm="Nothing is learned while it lasts, and without a scaler the weights are probably "
        "destroyed: act immediately.",
        query='increase(mp_agent_grad_nonfinite_repeated_steps_total{run="RUN"}[10m])',
        reading="The number of steps in the last ten minutes with NaN or Inf gradients, counted "
        "from the third consecutive one. Isolated ones are common in healthy runs; three "
        "consecutive ones are not.",
        causes=(
            "Weights that an earlier step made NaN or too large: check the norm before.",
            "An operation whose backward is not defined at a value that occurs.",
            "A trainer that skips such steps itself, so the weights do not change and the same "
            "step fails repeatedly.",
            "Faulty hardware on one rank.",
        ),
        false_positives=(
            "A scaler that hooks cannot see, while it searches for its scale in the first steps.",
        ),
        samples=("find_the_operation", "guard_update"),
        panels=(panels.NONFINITE_ELEMENTS, panels.FIRST_NONFINITE, panels.LOSS),
    ),
)


_UPDATES = Count(metric=gradients.NONFINITE_UPDATES, window=duration("incident_window"))


NONFINITE_UPDATE = Condition(
    name="MpAgentNonFiniteUpdate",
    summary="The optimizer stepped with NaN or Inf gradients.",
    meaning="The updated weights become NaN; without a checkpoint from before that step, the "
    "run is lost.",
    confirm="mp_agent_first_nonfinite_info names step, layer and, if there is evidence, rank.",
    remedies=(
        GoBack("Stop the run and resume from a checkpoint from before the step."),
        *NONFINITE_REMEDIES,
    ),
    why=WHY_NONFINITE_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=UPDATED,
            when=happened(_UPDATES),
            description="Run {run} stepped its optimizer "
            "{value|count} time(s) with NaN or Inf gradients in the last "
            "<incident_window>." + FIRST_NONFINITE,
            reason="No delay: the first such step destroys the weights.",
        ),
    ),
    quiet=("an overflow that GradScaler skipped",),
    follows_from=NAN_UPDATE_CAUSES,
    needs=((Quantity.GRAD_NORM,),),
    guidance=Guidance(
        harm="The weights are very likely destroyed, and every further step and checkpoint is "
        "worthless: stop the run now.",
        query='mp_agent_nonfinite_updates_total{run="RUN",optimizer=""} > 0',
        reading="The number of updates with NaN or Inf gradients since the node agent's start. "
        "mp_agent_first_nonfinite_info names the first step, and rank and layer if there is "
        "evidence.",
        causes=(
            "BF16 or FP32 training, where nothing skips such a step as GradScaler does in FP16.",
            "An overflow, a division by zero or a logarithm of zero in the forward pass: the loss "
            "was not finite on the same step.",
            "An operation whose backward is not defined at a value that occurs: sqrt or norm at "
            "zero, atan2 at the origin.",
            "Corrupt data or faulty hardware on one rank: its own loss became non-finite first.",
        ),
        false_positives=(
            "An optimizer that ignores non-finite gradients itself: the update is harmless, but "
            "the counter cannot detect that.",
        ),
        samples=("guard_update", "find_the_operation"),
        panels=(panels.NONFINITE_UPDATES, panels.FIRST_NONFINITE, panels.NONFINITE_ELEMENTS),
    ),
)


_CLIPPING_BEFORE_UNSCALE_STEPS = Series(metric=gradient_layers.CLIP_SCALED_STEPS)


CLIPPING_BEFORE_UNSCALE = Condition(
    name="MpAgentClippingBeforeUnscale",
    summary="Gradients are clipped before they are unscaled.",
    meaning="The limit applies to gradients multiplied by the loss scale, so every step is "
    "shrunk by about that factor: plain SGD hardly moves, and Adam's steps are not limited.",
    confirm="mp_agent_clip_coefficient is about max_norm divided by the loss scale and the "
    "norm at every step, and mp_agent_clipped_steps_total grows with every step.",
    remedies=("Call scaler.unscale_(optimizer) before clipping, then scaler.step(optimizer).",),
    why="GradScaler multiplies the gradients until unscale_ or step divides them again; only "
    "then does a limit have the units of the gradient.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(_CLIPPING_BEFORE_UNSCALE_STEPS, ">=", limit("scaled_clip_steps")),
            counts_steps=True,
            description="Run {run} clips gradients that are still multiplied by the loss scale, "
            "on {value|count} consecutive steps.",
            reason="No delay: the condition already requires scaled_clip_steps consecutive steps.",
        ),
    ),
    quiet=("a few steps whose norm has that value by chance",),
    needs=((Quantity.GRAD_NORM, Quantity.LOSS_SCALE, Quantity.CLIPPING),),
    knobs=(less_above("scaled_clip_steps"),),
    guidance=Guidance(
        harm="No state is damaged; the run learns far more slowly than it could, or without the "
        "protection that clipping should provide. Investigate during working hours.",
        query='mp_agent_clip_scaled_steps{run="RUN"}',
        reading="The number of consecutive steps whose clipping saw scaled gradients; "
        "mp_agent_clip_coefficient is then about 1e-5 at a scale of 65 536 and a norm of 1.",
        causes=(
            "scaler.unscale_(optimizer) is missing before clip_grad_norm_.",
            "unscale_ is called for a different optimizer than the one whose gradients are "
            "clipped.",
            "Gradients that were divided by the scale by hand before they are clipped, which "
            "scaler.step divides by it once more.",
        ),
        false_positives=("A limit that was multiplied by the loss scale on purpose.",),
        samples=("clip_after_unscale",),
        panels=(panels.CLIPPING, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
)


_RANK_NONFINITE_WINDOW = duration("incident_window")
_NAMED = (Where("rank", "!=", ""),)
_KEPT = ("rank", "step")
_INCIDENT = Series(metric=run.FIRST_NONFINITE, where=_NAMED, keep=_KEPT)
_KNOWN = Series(
    metric=run.FIRST_NONFINITE,
    over=("present_over_time", duration("birth_window")),
    before=(_RANK_NONFINITE_WINDOW,),
    where=_NAMED,
    keep=_KEPT,
)
_LOSSES = Count(metric=run.LOSS_NONFINITE_STEPS, window=_RANK_NONFINITE_WINDOW)
"""Of which there are some when the incident is news, and not only the Prometheus that sees it. A
value that arose in backward is in the weights, and in the loss of the next step."""
_SEVERAL_RANKS = Series(metric=run.RUN_INFO, where=(Where("world_size", "!=", "1"),))


RANK_NONFINITE = Condition(
    name="MpAgentRankNonFinite",
    summary="One rank had the first NaN or Inf values.",
    meaning="The value originated on that rank, from its data or its hardware; the next "
    "reduction spreads it to all others.",
    confirm="Compare mp_agent_rank_loss_nonfinite_steps_total and mp_agent_rank_loss of that "
    "rank with those of the others, and, with measure_local_gradients, "
    "mp_agent_rank_local_grad_nonfinite_elements_total; mp_agent_rank_info names the host and the "
    "GPU.",
    remedies=(
        "Check the rank's batch at that step.",
        "Check the rank's hardware (XID, ECC), and move the run off the node if it is faulty.",
        *NONFINITE_REMEDIES[:2],
    ),
    why="The model is the same on all ranks, so the difference is in the rank's data or hardware.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights=NO_NAN_COUNTED,
                now="save a checkpoint, and check the batch and the GPU of rank {rank}",
                updated=Triage(
                    weights=NAN_WRITTEN,
                    now=f"{ROLL_BACK}, without the GPU of rank {{rank}} if it reports errors",
                ),
            ),
            when=unless(
                all_of(Seen(_INCIDENT), Seen(_SEVERAL_RANKS), happened(_LOSSES)), Seen(_KNOWN)
            ),
            description="Rank {rank} of run {run} had the first NaN or Inf, at step {step}, "
            "before the gradient reduction.",
            reason="No delay: a rank is named only on evidence.",
        ),
    ),
    quiet=(
        "an incident of hours ago, seen by a Prometheus that starts empty",
        "a value from the backward pass, or on all ranks, which names no rank",
        "a run with a single rank, where naming it has no value",
    ),
    follows_from=("MpAgentGradientExplosion", "MpAgentLearningRateJump"),
    needs=((Quantity.RANKS,),),
    guidance=Guidance(
        harm="The next reduction spreads the values of this rank to the gradients of all ranks. "
        "Without a scaler the weights of all ranks are lost: stop the run.",
        query='last_over_time(mp_agent_first_nonfinite_info{run="RUN",rank!=""}[1h])',
        reading="The step and the rank where it started, before any reduction. "
        "mp_agent_rank_loss_nonfinite_steps_total shows the ranks affected since then: a single "
        "rank indicates its data or its hardware, all ranks indicate the model. With "
        '`phase="backward"` the loss of the step was finite, and the rank\'s own gradients were '
        "not: `measure_local_gradients` looks at them before they are reduced.",
        causes=(
            "Corrupt samples in this rank's shard of the data.",
            "A failing GPU: check for XID errors, ECC errors and thermal throttling on its host.",
            "A very long or empty sample that only this rank has processed so far: a mean over no "
            "tokens, an attention mask that hides everything.",
            "A different software version on one node: driver, CUDA or library.",
        ),
        false_positives=(
            "A single overflowed forward pass in FP16 that GradScaler skipped; the alert fires "
            "only if the overflow persists.",
        ),
        samples=("check_batch", "find_the_operation"),
        panels=(panels.NONFINITE_RANKS, panels.XID_ERRORS, panels.FIRST_NONFINITE),
    ),
)


_LOSS_NONFINITE_WINDOW = duration("incident_window")
_LOSS_NONFINITE_STEPS = Count(
    metric=training.LOSS_NONFINITE_UNSKIPPED, window=_LOSS_NONFINITE_WINDOW
) + Count(metric=training.LOSS_NONFINITE_REPEATED, window=_LOSS_NONFINITE_WINDOW)
"""Those on which the weights were updated, and those that skipping does not end."""


LOSS_NONFINITE = Condition(
    name="MpAgentLossNonFinite",
    summary="The loss is NaN or Inf.",
    meaning="The forward pass produces values that no update can use; unless the steps are "
    "skipped, the weights are lost.",
    confirm="mp_agent_rank_loss_nonfinite_steps_total shows the affected ranks; a single rank "
    "indicates its data or hardware.",
    remedies=NONFINITE_REMEDIES,
    why=WHY_NONFINITE_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights=NO_NAN_COUNTED,
                now="save a checkpoint, and find the operation before an update has its result",
                updated=UPDATED,
            ),
            when=happened(_LOSS_NONFINITE_STEPS),
            description="The loss of run {run} was NaN or Inf on "
            "{value|count} recent step(s)." + FIRST_NONFINITE,
            reason="No delay: each such step matters and is counted; the first two of "
            "consecutive skipped steps are not.",
        ),
    ),
    quiet=(
        "one overflowed forward pass during calibration",
        "overflows whose loss was finite",
    ),
    follows_from=(
        "MpAgentRankNonFinite",
        "MpAgentNonFiniteUpdate",
        "MpAgentActivationNonFinite",
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
    ),
    needs=((Quantity.LOSS,),),
    knobs=(less_above("nonfinite_losses"),),
    guidance=Guidance(
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
)


_ELEMENTS = Count(metric=activations.ACTIVATION_NONFINITE, window=duration("incident_window"))


ACTIVATION_NONFINITE = Condition(
    name="MpAgentActivationNonFinite",
    summary="A module returned NaN or Inf in the forward pass.",
    meaning="The loss and all gradients behind that module become non-finite; without a scaler "
    "that skips the step, so do the weights.",
    confirm="mp_agent_activation_first_nonfinite_info names the first module of the forward pass; "
    "mp_agent_layer_activation_abs_max shows how its output grew before.",
    remedies=(
        "Run the module that is named in FP32, if its output overflows FP16.",
        *NONFINITE_REMEDIES,
    ),
    why=WHY_NONFINITE_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights=NO_NAN_COUNTED,
                now="save a checkpoint, and run the module that is named in FP32",
                updated=Triage(
                    weights=NAN_WRITTEN, now=f"{ROLL_BACK} with the module that is named in FP32"
                ),
            ),
            when=happened(_ELEMENTS),
            description="Modules of run {run} returned {value|count} NaN or Inf element(s) on the "
            "steps that were sampled in the last <incident_window>."
            "{mp_agent_activation_first_nonfinite_info| First at |step layer}",
            reason="No delay: an output that is not finite never becomes finite again behind it.",
        ),
    ),
    quiet=(
        "outputs close to the largest number of FP16",
        "a run that does not measure outputs",
    ),
    follows_from=(
        "MpAgentRankNonFinite",
        "MpAgentNonFiniteUpdate",
        "MpAgentActivationNearOverflow",
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
    ),
    needs=((Quantity.ACTIVATIONS,),),
    guidance=Guidance(
        harm="Critical: without a scaler the weights are damaged at the same step; with one, "
        "steps are skipped and nothing is learned. Act immediately.",
        query='mp_agent_activation_first_nonfinite_info{run="RUN"}',
        reading="The module that was the first of a forward pass to return NaN or Inf, and the "
        "step of the sample that showed it. Sampled are the steps on which layers are measured, "
        "and those after trouble.",
        causes=(
            "The module's output overflows FP16: its magnitude grew over the steps before.",
            "Weights that an earlier step made NaN: then the first module with weights is named.",
            "A division by zero, a logarithm of zero or a root of a negative number in it.",
            "Corrupt input data: then the first module of the model is named.",
        ),
        false_positives=(
            "A module that returns -Inf on purpose, such as one that applies an attention mask: "
            "add the mask in a function instead, or set measure_activations to False.",
        ),
        samples=("overflowing_layer", "find_the_operation"),
        panels=(panels.ACTIVATIONS_NONFINITE, panels.ACTIVATIONS, panels.NONFINITE_ELEMENTS),
    ),
)


OF_GRADIENTS = (
    NONFINITE_UPDATE,
    GRADIENT_NONFINITE,
    CLIPPING_BEFORE_UNSCALE,
)
OF_LOSS = (LOSS_NONFINITE,)
OF_RANKS = (RANK_NONFINITE,)
OF_ACTIVATIONS = (ACTIVATION_NONFINITE,)
