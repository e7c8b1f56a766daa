"""Alerts on the gradients of single layers: lost, dead, exploding, or never there."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above, less_below
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened, sustained, sustained_steps
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import (
    Compare,
    Number,
    Predicate,
    Series,
    Where,
    all_of,
    any_of,
    limit,
    unless,
)
from mp_agent.alerting.first_line import Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.remedies import FP16, GoBack, Remedy
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import gradient_layers, training

_GRADIENT_UNDERFLOW_SHARE = Series(metric=gradient_layers.LAYERS_UNDERFLOWING)


GRADIENT_UNDERFLOW = Condition(
    name="MpAgentGradientUnderflow",
    summary="Gradients underflow to zero in many layers.",
    meaning="A growing part of the gradient is lost before it reaches the optimizer: the small "
    "values, which are the majority in most layers.",
    confirm="mp_agent_layers_underflowing_ratio, and mp_agent_layer_grad_zero_ratio of the layers "
    "that mp_agent_underflowing_layer_info names.",
    remedies=(
        Remedy(
            "Use a larger loss scale: raise growth_factor or lower growth_interval if "
            "mp_agent_grad_fp16_headroom shows that there is headroom.",
            FP16,
        ),
        Remedy("Train in BF16, which has the exponent range of FP32.", FP16),
        "Add normalization and residual paths, and check for frozen or detached branches.",
    ),
    why="FP16 has no values between zero and 6e-8: a larger scale moves gradients above that "
    "gap, and BF16 does not have it.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=all_of(
                Compare(_GRADIENT_UNDERFLOW_SHARE, ">", limit("underflow_layers")),
                sustained("underflow_layers"),
            ),
            keep=duration("layer_keep"),
            description="The gradients of {value|percent} of the layers of run {run} have far more "
            "zeros than at the start, or lie below FP16's smallest number."
            "{mp_agent_underflowing_layer_info| Among them: |layer}",
            counted=sustained_steps("underflow_layers"),
            reason="No delay: it takes all samples of sustained_steps steps, because a single "
            "batch can be unusual; the alert lasts beyond some samples, between which the layers "
            "vary.",
        ),
    ),
    quiet=(
        "two layers of a hundred",
        "a single sample of an unusual batch",
        "unused embedding rows and ReLU zeros, which are in the layers' baseline",
        "a run that hung after a single sample of an unusual batch",
    ),
    follows_from=(
        "MpAgentNothingTrained",
        "MpAgentGradientVanishing",
        "MpAgentLossScaleAtFloor",
        "MpAgentLossScaleFarBelowInitial",
    ),
    needs=((Quantity.LAYERS,),),
    knobs=(
        less_above("underflow_layers"),
        less_above("layer_zero_rise"),
        less_above("layer_flushed"),
    ),
    guidance=Guidance(
        harm="Part of the gradient is rounded to zero, so the affected layers learn from the "
        "remaining part. The run continues with lower quality; investigate during working hours.",
        query='last_over_time(mp_agent_underflowing_layer_info{run="RUN"}[15m])',
        reading="The layers whose gradient has far more zeros than in their first samples; "
        "mp_agent_layer_grad_zero_ratio has the share for each layer.",
        causes=(
            "The loss scale has fallen far below its initial value, so small gradients drop below "
            "FP16's smallest number.",
            "A gradient that is divided too early in FP16: by the world size, by accumulation "
            "steps or by the number of tokens.",
            "Layers behind a very small loss weight.",
        ),
        false_positives=(
            "Embeddings with rarely used rows, when the vocabulary of the data changes.",
            "ReLU layers that have become sparse by learning: the loss still falls. In FP32 and "
            "BF16 without a scaler zeros are taken for those of a ReLU.",
        ),
        samples=("underflow_share", "overflowing_layer"),
        panels=(panels.UNDERFLOWING_LAYERS, panels.MOST_ZEROS, panels.LOSS_SCALE),
    ),
)


_DEAD = Series(metric=gradient_layers.LAYERS_DEAD)


LAYER_GRADIENT_DEAD = Condition(
    name="MpAgentLayerGradientDead",
    summary="A layer's gradient is dead.",
    meaning="The layer no longer learns, nor do the layers before it on its path; the rest of "
    "the model continues to train.",
    confirm="mp_agent_dead_layer_info names the layers; plot their mp_agent_layer_grad_abs_max.",
    remedies=(
        Remedy("Use a larger loss scale, or BF16, if the gradient underflows FP16.", FP16),
        "Add normalization or a residual path around the layer, and check its activations: a "
        "ReLU that is never above zero passes no gradient.",
        "Check whether the layer was frozen or detached on purpose.",
    ),
    why="A gradient of 1e-10 is too small for an optimizer in 16 or 32 bits to change the "
    "weights; it must be scaled up, or take another path.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(_DEAD, ">", Number(0)),
            keep=duration("layer_keep"),
            description="{value|count} layer(s) of run {run} had almost no gradient in the last "
            "<layer_dead_samples> samples.{mp_agent_dead_layer_info| Among them: |layer}",
            reason="No delay: the condition already requires consecutive samples; the alert "
            "lasts beyond some samples, between which the layers vary.",
        ),
    ),
    quiet=(
        "frozen, unused and idle parameters, which are not counted",
        "a run whose layers were never sampled",
    ),
    follows_from=(
        "MpAgentGradientNonFinite",
        "MpAgentNothingTrained",
        "MpAgentGradientVanishing",
        "MpAgentGradientUnderflow",
    ),
    needs=((Quantity.LAYERS,),),
    knobs=(less_below("layer_dead_abs_max"),),
    guidance=Guidance(
        harm="The layer no longer learns while the rest of the model does; the run is not lost, "
        "but the trained model lacks that layer. Investigate during working hours.",
        query='last_over_time(mp_agent_dead_layer_info{run="RUN"}[15m])',
        reading="The layers whose gradient was close to zero in three consecutive samples, those "
        "nearest to the input first; mp_agent_layers_dead counts all of them.",
        causes=(
            "The layer's output is detached, or multiplied by a gate that has closed.",
            "Its activation is saturated: every ReLU is inactive, or a softmax is one-hot.",
            "FP16 underflow, which affects the layers with the smallest gradients first.",
            "It is frozen on purpose, but its parameters still require a gradient.",
        ),
        false_positives=(
            "Heads that only some tasks use, when they are unused for the first time.",
            "A parameter frozen by a learning rate of zero: set requires_grad to False.",
        ),
        samples=("dead_parameters",),
        panels=(panels.DEAD_LAYERS, panels.GRADIENT_NORM),
    ),
)


_EXPLODING = Series(metric=gradient_layers.LAYERS_EXPLODING)


LAYER_GRADIENT_EXPLOSION = Condition(
    name="MpAgentLayerGradientExplosion",
    summary="The gradient of a layer is exploding.",
    meaning="The layer dominates each update, or what clipping leaves of it: the others hardly "
    "learn, and the layer's weights leave their working range.",
    confirm="mp_agent_exploding_layer_info names the layers; plot their "
    "mp_agent_layer_grad_norm together with mp_agent_grad_norm.",
    remedies=(
        "Check the layer's inputs and weights: a missing normalization before it, or weights "
        "that have grown, are the usual causes.",
        "Use a lower learning rate or separate clipping for the layer until the cause is found.",
    ),
    why="The norm of the whole model hides a layer whose own gradient is small compared with "
    "the sum; relative to its own history, its growth is visible long before the sum grows.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_EXPLODING),
            keep=duration("layer_keep"),
            description="{value|count} layer(s) of run {run} had a gradient norm of more than "
            "<layer_growth> times their usual one in the last <layer_dead_samples> samples, while "
            "most layers had not.{mp_agent_exploding_layer_info| Among them: |layer}",
            reason="No delay: the condition already requires consecutive samples; the alert "
            "lasts beyond some samples, between which the layers vary.",
        ),
    ),
    quiet=("layers that all grow, which are not counted",),
    follows_from=("MpAgentLearningRateJump", "MpAgentGradientExplosion"),
    needs=((Quantity.LAYERS,),),
    knobs=(less_above("layer_growth"),),
    guidance=Guidance(
        harm="The run continues, but one layer dominates the clipped updates, and may raise the "
        "loss later. Investigate during working hours, sooner if the loss rises.",
        query='last_over_time(mp_agent_exploding_layer_info{run="RUN"}[15m])',
        reading="The layers whose norm is more than a hundred times their usual one in three "
        "consecutive samples, those nearest to the input first.",
        causes=(
            "The layer's weights or inputs have grown: a normalization before it is missing.",
            "A division inside the layer by a value that has become small, such as a variance.",
            "A rarely used branch that suddenly receives many inputs.",
            "A part of the model that was unfrozen with too high a learning rate.",
        ),
        false_positives=(
            "A layer that was initialized to 0, such as an adapter, and starts to learn late.",
            "A change of the data or the objective that affects only one branch.",
        ),
        samples=("smaller_learning_rate", "overflowing_layer"),
        panels=(panels.GRADIENT_NORM, panels.CLIPPING),
    ),
)


_LAYERS_WITHOUT_GRADIENT_SHARE = Series(metric=gradient_layers.LAYERS_WITHOUT_GRADIENT)
_MOST = Compare(_LAYERS_WITHOUT_GRADIENT_SHARE, ">", limit("layers_without_gradient"))
_NAMES = "{mp_agent_layer_without_gradient_info| Among them: |layer}"
_LAYERS_WITHOUT_GRADIENT_TEXT = (
    "{value|percent} of the layers that the optimizer of run {run} holds, and that require "
    "gradients, have never had one." + _NAMES
)


LAYERS_WITHOUT_GRADIENT = Condition(
    name="MpAgentLayersWithoutGradient",
    summary="Layers that the optimizer holds get no gradient.",
    meaning="These layers keep their initial weights, while the loss may still fall by what the "
    "others learn.",
    confirm="mp_agent_layer_without_gradient_info names the layers, and "
    "mp_agent_unheld_parameters_info parameters with gradients that no optimizer holds, if there "
    "are any. In the script, print the names of all parameters whose grad is None after backward.",
    remedies=(
        "If mp_agent_unheld_parameters_info names parameters that no optimizer holds, create the "
        "optimizer after the model has been copied, moved and wrapped, from the parameters of the "
        "model that computes the loss.",
        "With activation checkpointing, pass use_reentrant=False, or let the input of the first "
        "block require gradients (enable_input_require_grads of transformers): the reentrant form "
        "makes no gradients where no input requires one, as behind a frozen embedding.",
        "Check that the forward pass uses the layers, and that their outputs are not detached, "
        "or computed under no_grad.",
        "Set requires_grad to False for layers that are not to be trained.",
    ),
    why="An optimizer leaves out parameters without gradient, and says nothing.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=_MOST,
            description=_LAYERS_WITHOUT_GRADIENT_TEXT,
            reason="No delay: the metric already requires untrained_steps steps.",
        ),
        Level(
            severity=Severity.INFO,
            when=unless(Compare(_LAYERS_WITHOUT_GRADIENT_SHARE, ">", Number(0)), _MOST),
            description=_LAYERS_WITHOUT_GRADIENT_TEXT,
            reason="As for the warning, which it replaces where only few layers are concerned: "
            "heads and branches that the run does not use.",
        ),
    ),
    quiet=(
        "frozen parameters and idle experts, which are not counted",
        "a run whose layers were never sampled",
    ),
    follows_from=(
        "MpAgentParametersWithoutOptimizer",
        "MpAgentLayersCutOff",
        "MpAgentNothingTrained",
    ),
    needs=((Quantity.LAYERS,),),
    knobs=(less_above("layers_without_gradient"),),
    guidance=Guidance(
        harm="Nothing breaks, but what is not trained is missing from the result, and the run may "
        "have to be repeated: look before it is long.",
        query='mp_agent_layer_without_gradient_info{run="RUN"}',
        reading="The layers that have never had a gradient in this attempt, those nearest to the "
        "input first; mp_agent_layers_without_gradient_ratio is their share. The parameters that "
        'get gradients instead, if any, are in mp_agent_unheld_parameters_info{run="RUN"}.',
        causes=(
            "The optimizer was created before the model was copied, moved to a device or wrapped: "
            "it holds tensors that the loss does not depend on.",
            "Adapters in blocks under reentrant activation checkpointing, whose input requires no "
            "gradient because the embedding is frozen.",
            "A branch that the forward pass does not call, or whose output is detached.",
            "Modules that were replaced after the optimizer had been created.",
        ),
        false_positives=(
            "A head or a branch that is only used later on purpose: set requires_grad to False "
            "until then.",
        ),
        samples=("dead_parameters",),
        panels=(panels.DEAD_LAYERS, panels.GRADIENT_NORM),
    ),
)


_CERTAIN = "all gradients 0|loss 0 with non-finite gradients|loss 0 at once"
_RATES = "all learning rates 0"
_PROBABLE = (
    "learning rate 0|no gradients|loss 0|constant loss and gradient norm|"
    "gradients clipped to almost 0"
)
_NOTHING_TRAINED_TEXT = "Run {run} cannot have learned anything for {value|count} steps: {reason}."


def _for(reasons: str, threshold: str) -> Predicate:
    where = (Where("reason", "=~", reasons),)
    steps = Series(metric=training.UNTRAINED_STEPS, where=where, keep=("reason",))
    return Compare(steps, ">=", limit(threshold))


NOTHING_TRAINED = Condition(
    name="MpAgentNothingTrained",
    summary="Steps continue, but nothing is trained.",
    meaning="The optimizer steps, but the weights cannot improve: the run wastes compute.",
    confirm="mp_agent_untrained_steps shows duration and reason; compare mp_agent_loss, "
    "mp_agent_grad_norm and mp_agent_learning_rate.",
    remedies=(
        "Check the inputs of the loss: labels that are all masked, cross_entropy of a single "
        "output, which is 0 whatever the output, a detached output, a model in inference mode or "
        "with all parameters frozen.",
        "If the loss is exactly 0 or the same on every step, check the weights of the last "
        "checkpoint: they may have been damaged before, as adapters are by a wrong data type.",
        "Check the learning-rate schedule: its number of steps may be smaller than the run's.",
        "Where gradients are clipped to almost 0, give clip_grad_norm_ a limit of the size of "
        "usual norms (mp_agent_grad_norm), such as 1.0; 1e-8 is an epsilon.",
        GoBack(
            "If gradients are not finite, stop, and resume from a checkpoint from before the first "
            "such step."
        ),
    ),
    why="An optimizer steps with any gradient; a gradient or learning rate of 0 does not change "
    "the weights, and some trainers log a NaN loss as 0.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="not trained since {since}",
                now="stop, and check labels, loss and frozen parameters before you resume",
            ),
            when=_for(_CERTAIN, "untrained_steps"),
            counts_steps=True,
            description=_NOTHING_TRAINED_TEXT,
            reason="No delay: the condition already requires untrained_steps consecutive steps.",
        ),
        Level(
            severity=Severity.WARNING,
            when=any_of(
                _for(_RATES, "zero_rate_steps"),
                _for(_PROBABLE, "probably_untrained_steps"),
                _for("constant loss", "constant_loss_steps"),
            ),
            counts_steps=True,
            description=_NOTHING_TRAINED_TEXT,
            reason="No delay: where it takes more steps than that, the node agent leaves out what "
            "a falling loss disproves, which takes it some losses to see.",
        ),
    ),
    quiet=(
        "a few steps at learning rate 0, as at both ends of a schedule",
        "a rounded loss that is constant for some time",
    ),
    follows_from=("MpAgentNonFiniteUpdate",),
    needs=(
        (Quantity.LOSS,),
        (Quantity.GRAD_NORM,),
        (Quantity.LEARNING_RATE,),
    ),
    knobs=(less_above("untrained_steps", "zero_rate_steps", "constant_loss_steps"),),
    guidance=Guidance(
        harm="No state is damaged, but the run learns nothing and wastes compute. Critical: stop "
        "the run. Warning: investigate within the hour.",
        query='mp_agent_untrained_steps{run="RUN"}',
        reading="The number of consecutive steps in which nothing can have been learned, by "
        "reason.",
        causes=(
            "All labels are masked, so the loss and its gradients are 0.",
            "cross_entropy or softmax over a single output: 0 and 1, whatever the output.",
            "A factor of 0 between a loss that is not 0 and the parameters: a mask, units that are "
            "all off, adapters of which both matrices are 0.",
            "A NaN loss that the trainer logs, and passes on, as 0: it is 0 from one step to the "
            "next, and stays so.",
            "A schedule that has reached its end while the run continues with learning rate 0.",
            "A detached output or frozen parameters: no gradient reaches the optimizer.",
            "An epsilon in the place of clipping's limit, as clip_grad_norm_(parameters, 1e-8).",
            "A saturated output, or a model that answers every input alike: the loss is the same "
            "for every batch, as 0.6931 (ln 2) for two classes that are equally frequent.",
            "Weights that are gone: a loss that falls to exactly 0 for good, and a gradient norm "
            "that is the same on every step.",
        ),
        false_positives=(
            "A first parameter group with learning rate 0 on purpose, while the loss no longer "
            "falls.",
            "A small data set that is learned to a loss of exactly 0: stop the run.",
            "A hinge loss of data that one step of a log without gradient norms separates.",
            "An optimizer that has converged, such as L-BFGS on a fixed batch: stop the run.",
            "Gradients that hooks cannot see: mp_agent_unsupported_info says what is not measured.",
        ),
        samples=("dead_parameters", "check_batch"),
        panels=(panels.LOSS, panels.GRADIENT_NORM, panels.LEARNING_RATE),
    ),
)


CONDITIONS = (
    GRADIENT_UNDERFLOW,
    LAYER_GRADIENT_DEAD,
    LAYER_GRADIENT_EXPLOSION,
    LAYERS_WITHOUT_GRADIENT,
    NOTHING_TRAINED,
)
