"""Runbook texts: gradients."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.panels import Guidance

GRADIENTS = {
    "MpAgentGradientExplosion": Guidance(
        harm="Critical: a single unclipped update of this size can undo days of training; act "
        "within minutes, before the next checkpoint overwrites a good one. Warning: the run is "
        "close to that. Info: clipping contains it; investigate during working hours.",
        query='max_over_time(mp_agent_grad_norm_window_max{run="RUN",optimizer=""}[10m])',
        reading="The largest gradient norm of the last ten minutes; most healthy runs stay "
        "between 0.1 and 10. Compare it with mp_agent_grad_norm_usual, the run's own level, and "
        "with the loss over the same time: a loss that jumped means that the weights are damaged. "
        "If several optimizers train one model, this is the norm over all of them; the label "
        "optimizer has the norm of each.",
        causes=(
            "The learning rate is too high for this stage, or its warm-up is too short.",
            "Clipping is missing, or runs before unscale_, so that its limit applies to gradients "
            "that are still multiplied by the loss scale.",
            "A batch of corrupt or unusual data: check the loss per rank at that step.",
            "Residual branches without normalization, or an initialization that is too large.",
            "The optimizer state was lost at a restart, so Adam's first steps are too large.",
        ),
        false_positives=(
            "Norms that change level on purpose, such as when layers are unfrozen or a loss term "
            "is added: the new level becomes the usual one after some hundred steps.",
            "Clipping that hooks cannot see (custom code, a whole step under torch.compile): the "
            "agent does not know that it contains the norm. The label measuring_point of "
            "mp_agent_run_info says what is measured.",
        ),
        samples=("clip_after_unscale", "smaller_learning_rate"),
        panels=(panels.GRADIENT_NORM, panels.STEPS_BEYOND_LIMITS, panels.CLIPPING, panels.LOSS),
    ),
    "MpAgentGradientVanishing": Guidance(
        harm="No state is damaged, but the run uses compute without learning. Critical: updates "
        "are effectively zero; stop the run. Warning and info: decide within hours.",
        query='mp_agent_grad_norm_window_max{run="RUN",optimizer=""}',
        reading="The largest norm of the last two minutes. Below 0.001 with a constant loss, the "
        "run has stopped learning; with a loss that still falls, it converges.",
        causes=(
            "In FP16, gradients underflow because the loss scale has fallen: check the loss scale "
            "over the last hours.",
            "A branch was detached or frozen by mistake, so only few parameters learn.",
            "The learning-rate schedule or a loss weight has decayed to zero.",
            "Saturated activations, or deep paths without residual connections and normalization.",
        ),
        false_positives=(
            "A small fine-tuning run that has converged: stop it, or lower grad_norm_low.",
            "A loss divided by a large constant (tokens times ranks) has small norms from the "
            "first step and raises at most an info alert: lower grad_norm_low.",
        ),
        samples=("dead_parameters", "underflow_share"),
        panels=(panels.GRADIENT_NORM, panels.ZERO_ELEMENTS, panels.LOSS),
    ),
    "MpAgentLayerGradientDead": Guidance(
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
    "MpAgentLayersWithoutGradient": Guidance(
        harm="Nothing breaks, but what is not trained is missing from the result, and the run may "
        "have to be repeated: look before it is long.",
        query='mp_agent_layer_without_gradient_info{run="RUN"}',
        reading="The layers that have never had a gradient in this attempt, those nearest to the "
        "input first; mp_agent_layers_without_gradient_ratio is their share. The parameters that "
        'get gradients instead, if any, are in mp_agent_unsupported_info{run="RUN"}.',
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
    "MpAgentGradientUnderflow": Guidance(
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
            "ReLU layers that have become sparse by learning: the loss still falls.",
        ),
        samples=("underflow_share", "overflowing_layer"),
        panels=(panels.UNDERFLOWING_LAYERS, panels.MOST_ZEROS, panels.LOSS_SCALE),
    ),
    "MpAgentHeadroomVanishing": Guidance(
        harm="A small part of the gradient is lost, and more will be as the scale falls. Look when "
        "you next tune the run.",
        query='mp_agent_grad_fp16_flushed_ratio{run="RUN"}',
        reading="The share of the non-zero gradients that FP16 rounds to zero, at half, at the "
        "present and at double the loss scale. At double it should be near 0; that this scale "
        "overflows is the trouble.",
        causes=(
            "One layer has far larger gradients than all others, such as an output layer or an "
            "embedding: it keeps the scale low for the rest.",
            "Gradients shrink with depth: residual paths or normalization are missing.",
            "A loss term with a small weight in addition to one with a large weight.",
        ),
        false_positives=(
            "Layers whose gradients are tiny and do not matter, such as biases before a "
            "normalization.",
        ),
        samples=("underflow_share", "overflowing_layer"),
        panels=(panels.GRADIENT_EXPONENTS, panels.FLUSHED, panels.LOSS_SCALE),
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
    "MpAgentLayerGradientExplosion": Guidance(
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
    "MpAgentGradientNonFinite": Guidance(
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
    "MpAgentClippingBeforeUnscale": Guidance(
        harm="No state is damaged; the run learns far more slowly than it could, or without the "
        "protection that clipping should provide. Investigate during working hours.",
        query='mp_agent_clip_scaled_steps{run="RUN"}',
        reading="The number of consecutive steps whose clipping saw scaled gradients; "
        "mp_agent_clip_coefficient is then about 1e-5 at a scale of 65 536 and a norm of 1.",
        causes=(
            "scaler.unscale_(optimizer) is missing before clip_grad_norm_.",
            "unscale_ is called for a different optimizer than the one whose gradients are "
            "clipped.",
        ),
        false_positives=("A limit that was multiplied by the loss scale on purpose.",),
        samples=("clip_after_unscale",),
        panels=(panels.CLIPPING, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
}
