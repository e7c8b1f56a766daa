"""Runbook texts: outputs of modules."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

ACTIVATIONS = {
    "MpAgentActivationNonFinite": Guidance(
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
    "MpAgentActivationNearOverflow": Guidance(
        harm="Nothing is lost yet; a slightly larger output overflows and its step is lost. "
        "Investigate within hours.",
        query='increase(mp_agent_activation_near_overflow_elements_total{run="RUN"}[10m])',
        reading="The elements of the last ten minutes, of the steps that were sampled. "
        "mp_agent_layer_activation_abs_max shows the modules with the largest outputs.",
        causes=(
            "Residual streams that grow with depth and with training, without normalization.",
            "Attention logits or output logits that grow, as with a learning rate too high.",
            "Sums over many elements in FP16, such as a mean over a long sequence.",
        ),
        false_positives=("Outputs that are large by design and bounded, such as masks of -65504.",),
        samples=("overflowing_layer", "stable_operations"),
        panels=(panels.ACTIVATIONS_NONFINITE, panels.ACTIVATIONS),
    ),
    "MpAgentAttentionLogitGrowth": Guidance(
        harm="No damage yet; runs with such growth often diverge hundreds of steps later. "
        "Investigate within hours.",
        query='mp_agent_attention_high_layer_info{run="RUN"}',
        reading="The modules whose largest attention logit was above the limit in the latest "
        "sample; mp_agent_layer_attention_logit_max shows how each has grown. Other heads and "
        "positions are looked at in each sample, so the curve scatters.",
        causes=(
            "A learning rate that is too high for attention without QK-norm.",
            "No weight decay on the query and key weights, whose norms grow.",
            "Second moments that are out of date, so that updates of these weights are too large.",
        ),
        false_positives=(
            "A fine-tuning whose model has large logits by design: they are high, but not growing.",
        ),
        samples=("faster_second_moment",),
        panels=(panels.ATTENTION_LOGITS, panels.LOSS, panels.LEARNING_RATE),
    ),
    "MpAgentRouterCollapse": Guidance(
        harm="No damage to the weights; experts that get no tokens learn nothing, and the model "
        "trains as if it were smaller. Investigate within hours.",
        query='mp_agent_collapsed_router_info{run="RUN"}',
        reading="The routers that send most tokens to few experts and are sure of it; "
        "mp_agent_layer_router_load_max and mp_agent_layer_router_entropy_ratio show since when.",
        causes=(
            "No load-balancing loss, one whose weight is too small, or one that is computed but "
            "not added to the loss (output_router_logits in Transformers).",
            "Router logits that grow without a z-loss, in 16 bits above all.",
            "A learning rate that is too high for the router.",
        ),
        false_positives=(
            "A fine-tuning on data of one kind, for which few experts are enough.",
            "Batches that are mostly padding, which one expert gets.",
        ),
        samples=("balance_experts",),
        panels=(panels.ROUTER_LOAD, panels.ROUTER_ENTROPY, panels.LOSS),
    ),
    "MpAgentFp8Saturation": Guidance(
        harm="No damage to the weights at once; forward and backward passes compute with wrong "
        "numbers, and the loss learns more slowly, drifts or diverges. Investigate within hours.",
        query='mp_agent_fp8_misscaled_layer_info{run="RUN"}',
        reading="The layers whose scales do not fit. Reason saturated: "
        "mp_agent_layer_fp8_range_used_max says by which factor elements are cut off. Reason "
        "unused: mp_agent_layer_fp8_range_used_min says by which factor a scale is too small, and "
        "every halving is a binade lost at the lower end.",
        causes=(
            "Scales that are not updated any more: layers called outside the autocast region, "
            "or an amax of NaN or Inf that stays in the history.",
            "A tensor whose amax jumps from step to step, with a history that is short or of which "
            "the latest value alone is used.",
            "A state of scales that was not restored, or restored from another run, with a "
            "checkpoint.",
            "Activations or gradients that explode from pass to pass.",
        ),
        false_positives=(
            "Batches of very different data in turn, with a history shorter than one turn: scales "
            "are wrong for some, and few elements may be concerned.",
        ),
        samples=("scale_from_history",),
        panels=(panels.FP8_RANGE, panels.FP8_FLUSHED, panels.LOSS),
    ),
    "MpAgentOutputLogitDivergence": Guidance(
        harm="No damage yet; the loss loses precision as the logits drift, and may diverge. "
        "Investigate within hours.",
        query='mp_agent_output_logsumexp_size{run="RUN"}',
        reading="The largest magnitude of a log-sum-exp at the latest sample. Near the logarithm "
        "of the number of classes is usual for a model that has learned little.",
        causes=(
            "A long training without a z-loss or weight decay on the output layer.",
            "A learning rate that is too high for the output layer.",
        ),
        false_positives=("A loss with logits that are multiplied by a temperature on purpose.",),
        samples=("stable_operations",),
        panels=(panels.OUTPUT_LOGITS, panels.LOSS, panels.LEARNING_RATE),
    ),
}
