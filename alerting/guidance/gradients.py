"""Runbook texts: gradients."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

GRADIENTS = {
    "MpAgentGradientExplosion": Guidance(
        harm="Critical: a single unclipped update of this size can undo days of training; look "
        "within minutes, before the next checkpoint overwrites a good one. Warning: the run is "
        "close to that. Info: clipping contains it; look in working hours.",
        query='max_over_time(mp_agent_grad_norm_window_max{run="RUN",optimizer=""}[10m])',
        reading="The largest gradient norm of the last ten minutes; most healthy runs stay "
        "between 0.1 and 10. Compare it with mp_agent_grad_norm_usual, the run's own level, and "
        "with the loss over the same time: a loss that jumped says that the weights were hit. Of "
        "several optimizers of one model it is the norm of all of them; by the label optimizer "
        "there is that of each.",
        causes=(
            "The learning rate is too high for this stage, or its warm-up is too short.",
            "Clipping is missing, or sits before unscale_, where its limit applies to gradients "
            "that are still multiplied by the loss scale.",
            "A batch of broken or unusual data: look at the loss per rank at that step.",
            "Residual branches without normalisation, or an initialisation that is too large.",
            "The optimizer state was lost at a restart, so that Adam's first steps are too long.",
        ),
        false_positives=(
            "Norms that change level on purpose, as when layers are unfrozen or a loss term is "
            "added: they become usual after some hundred steps.",
            "Clipping that hooks cannot see (custom code, a whole step under torch.compile) is not "
            "known to contain the norm; the label measuring_point of mp_agent_run_info says what "
            "is measured.",
        ),
        samples=("clip_after_unscale", "smaller_learning_rate"),
        panels=(panels.GRADIENT_NORM, panels.STEPS_BEYOND_LIMITS, panels.CLIPPING, panels.LOSS),
    ),
    "MpAgentGradientVanishing": Guidance(
        harm="Nothing is destroyed, but the run burns its machines without learning. Critical: the "
        "updates are as good as zero, stop it. Warning and info: decide within hours.",
        query='mp_agent_grad_norm_window_max{run="RUN",optimizer=""}',
        reading="The largest norm of the last two minutes. Below 0.001 with a loss that stands "
        "still, the run has stopped learning; with a loss that still falls, it converges.",
        causes=(
            "In FP16, gradients underflow because the loss scale has fallen: look at the loss "
            "scale over the last hours.",
            "A branch was detached or frozen by mistake, so that only few parameters learn.",
            "The learning-rate schedule or a loss weight has decayed to zero.",
            "Saturated activations, or deep paths without residuals and normalisation.",
        ),
        false_positives=(
            "A small fine-tune that has converged: stop it, or lower grad_norm_low.",
            "A loss divided by a large constant (tokens times ranks) has small norms from the "
            "first step, which is a hint at most: lower grad_norm_low.",
        ),
        samples=("dead_parameters", "underflow_share"),
        panels=(panels.GRADIENT_NORM, panels.ZERO_ELEMENTS, panels.LOSS),
    ),
    "MpAgentLayerGradientDead": Guidance(
        harm="The layer no longer learns while the rest goes on; the run is not lost, but the "
        "model it makes lacks a layer. Look in working hours.",
        query='last_over_time(mp_agent_dead_layer_info{run="RUN"}[15m])',
        reading="The layers whose gradient was next to nothing at three looks running, those "
        "nearest to the input first; mp_agent_layers_dead counts all of them.",
        causes=(
            "The layer's output is detached, or multiplied by a gate that has closed.",
            "Its activation is saturated: every ReLU of it is off, or a softmax is one-hot.",
            "FP16 underflow: only the layers with the smallest gradients are hit first.",
            "It is frozen on purpose but its parameters still require a gradient.",
        ),
        false_positives=(
            "Heads that only some tasks use, when they are left out for the first time.",
            "A parameter that is frozen by a learning rate of zero: set requires_grad to False.",
        ),
        samples=("dead_parameters",),
        panels=(panels.DEAD_LAYERS, panels.GRADIENT_NORM),
    ),
    "MpAgentGradientUnderflow": Guidance(
        harm="Part of the gradient is rounded to zero, so that the affected layers learn from what "
        "is left. The run goes on and gets worse; look in working hours.",
        query='last_over_time(mp_agent_underflowing_layer_info{run="RUN"}[15m])',
        reading="The layers whose gradient has far more zeros than in their first samples; "
        "mp_agent_layer_grad_zero_ratio tells how many, for each layer.",
        causes=(
            "The loss scale has fallen far below its initial value, so that small gradients drop "
            "below FP16's smallest number.",
            "A gradient that is divided too early: by the world size, by accumulation steps or by "
            "the number of tokens, in FP16.",
            "Layers behind a very small loss weight.",
        ),
        false_positives=(
            "Embeddings whose rows are touched rarely, when the vocabulary of the data changes.",
            "ReLU layers that have become sparse by learning: the loss still falls.",
        ),
        samples=("underflow_share", "overflowing_layer"),
        panels=(panels.UNDERFLOWING_LAYERS, panels.MOST_ZEROS, panels.LOSS_SCALE),
    ),
    "MpAgentGradientAtFloor": Guidance(
        harm="A small part of the gradient is rounded to zero in some layers; the run goes on. "
        "Look when you next tune the loss scale, sooner if MpAgentGradientUnderflow follows.",
        query='mp_agent_grad_abs_min{run="RUN",optimizer=""} '
        '* ignoring(optimizer) mp_agent_loss_scale{run="RUN"}',
        reading="The smallest gradient as FP16 held it. 5.96e-8 is the smallest number of FP16: "
        "all smaller ones became zero. mp_agent_layer_grad_abs_min shows in which layers.",
        causes=(
            "The loss scale has fallen, or was given too low at the start.",
            "The loss is divided by a large number before its backward in FP16.",
            "Layers behind a very small loss weight.",
        ),
        false_positives=(
            "New zeros of another origin, such as rarely used embedding rows, in a run with so "
            "many gradients that its smallest one is always at the limit.",
        ),
        samples=("underflow_share",),
        panels=(panels.UNDERFLOWING_LAYERS, panels.MOST_ZEROS, panels.LOSS_SCALE),
    ),
    "MpAgentNonFiniteUpdate": Guidance(
        harm="The weights are very likely destroyed already, and every further step and checkpoint "
        "is worthless: stop the run now.",
        query='mp_agent_nonfinite_updates_total{run="RUN",optimizer=""} > 0',
        reading="How many updates were made with NaN or Inf gradients since the node agent's "
        "start. mp_agent_first_nonfinite_info names the first step, and rank and layer as far as "
        "there is evidence.",
        causes=(
            "BF16 or FP32 training, where nothing skips such a step as GradScaler does in FP16.",
            "An overflow, a division by zero or a logarithm of zero in the forward pass: the loss "
            "was not finite on the same step.",
            "An operation whose backward is not defined at a value that occurs: sqrt or norm at "
            "zero, atan2 at the origin.",
            "One rank's broken data or hardware: its own loss went first.",
        ),
        false_positives=(
            "An optimizer that itself ignores non-finite gradients; the update is harmless then, "
            "but the count cannot know.",
        ),
        samples=("guard_update", "find_the_operation"),
        panels=(panels.NONFINITE_UPDATES, panels.FIRST_NONFINITE, panels.NONFINITE_ELEMENTS),
    ),
    "MpAgentLayerGradientExplosion": Guidance(
        harm="The run goes on, but one layer takes the updates of the others, and may drive the "
        "loss up later. Look in working hours, sooner if the loss has begun to rise.",
        query='last_over_time(mp_agent_exploding_layer_info{run="RUN"}[15m])',
        reading="The layers whose norm is more than a hundred times their usual one at three "
        "looks running, those nearest to the input first.",
        causes=(
            "The layer's weights or inputs have grown: a normalisation before it is missing.",
            "A division by something that has become small inside the layer, such as a variance.",
            "A rarely used branch that suddenly gets many inputs.",
            "A part of the model that was unfrozen with too high a learning rate.",
        ),
        false_positives=(
            "A layer that was initialised at 0, as adapters are, and has begun to learn late.",
            "A change of the data or objective that reaches one branch only.",
        ),
        samples=("smaller_learning_rate", "overflowing_layer"),
        panels=(panels.GRADIENT_NORM, panels.CLIPPING),
    ),
    "MpAgentGradientNonFinite": Guidance(
        harm="Nothing is learned while it lasts, and without a scaler the weights are probably "
        "destroyed already: look at once.",
        query='increase(mp_agent_grad_nonfinite_repeated_steps_total{run="RUN"}[10m])',
        reading="On how many steps of the last ten minutes a gradient was NaN or Inf, from the "
        "third in a row on. Isolated ones are common in healthy runs; three in a row are not.",
        causes=(
            "Weights that an earlier step has made NaN or too large: look at the norm before.",
            "An operation whose backward is not defined at a value that occurs.",
            "A trainer that skips such steps by itself, so that the weights stay as they are and "
            "the same step fails for ever.",
            "Broken hardware on one rank.",
        ),
        false_positives=(
            "A scaler that hooks cannot see, which searches for its scale in the first steps.",
        ),
        samples=("find_the_operation", "guard_update"),
        panels=(panels.NONFINITE_ELEMENTS, panels.FIRST_NONFINITE, panels.LOSS),
    ),
    "MpAgentClippingBeforeUnscale": Guidance(
        harm="Nothing is destroyed; the run learns far more slowly than it could, or without the "
        "protection that clipping was meant to give. Look in working hours.",
        query='mp_agent_clip_scaled_steps{run="RUN"}',
        reading="For how many steps in a row clipping saw scaled gradients; "
        "mp_agent_clip_coefficient is then about 1e-5 where the scale is 65 536 and the norm 1.",
        causes=(
            "scaler.unscale_(optimizer) is missing before clip_grad_norm_.",
            "unscale_ is called for another optimizer than the one whose gradients are clipped.",
        ),
        false_positives=("A limit that was multiplied by the loss scale on purpose.",),
        samples=("clip_after_unscale",),
        panels=(panels.CLIPPING, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
}
