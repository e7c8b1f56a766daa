"""Guidance on activations, watched tensors, optimizers and reinforcement learning."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.panels import Guidance

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


TENSORS = {
    "MpAgentReductionSwallows": Guidance(
        harm="The run goes on with a loss, mean or norm that is too small, and with gradients of "
        "some terms that are lost. Investigate during working hours.",
        query='mp_agent_tensor_reduction_swallowed_ratio{run="RUN"}',
        reading="The share of the sum of magnitudes that a running sum in the tensor's dtype does "
        "not get, by tensor, on the last sampled step. Below 0.01 it is rounding.",
        causes=(
            "A loop that adds losses up in 16 bits, such as total += loss under autocast.",
            "A kernel or collective that accumulates in 16 bits, such as a BF16 all-reduce.",
            "A batch or sequence that has grown: the more terms, the larger the sum they meet.",
            "A few terms that are far larger than the rest, such as outliers in the data.",
        ),
        false_positives=(
            "A sum by torch.sum or torch.mean: those accumulate in FP32 and round once. Watch it "
            "without reduction=True.",
        ),
        samples=("sum_in_float32", "stable_operations"),
        panels=(panels.SWALLOWED_TERMS, panels.RANGE_OF_TENSORS),
    ),
    "MpAgentDimensionImbalance": Guidance(
        harm="The run goes on and learns little from the slices with small ranges. Investigate "
        "during working hours.",
        query='mp_agent_tensor_slice_imbalance{run="RUN"}',
        reading="The largest range of a slice divided by the smallest, by tensor, on the last "
        "sampled step. mp_agent_tensor_worst_slice is the index of the slice at fault.",
        causes=(
            "Features in different units, such as a price and a rate, that are not standardized.",
            "Outlier features: a few channels whose activations grow far beyond the others.",
            "A slice that is almost constant, such as an unused feature with a little noise.",
        ),
        false_positives=(
            "Slices that are to differ and are never added or normalized together: watch them as "
            "tensors of their own.",
        ),
        samples=("standardize_features",),
        panels=(panels.RANGE_OF_TENSORS, panels.SWALLOWED_TERMS),
    ),
}


REINFORCEMENT = {
    "MpAgentTrainInferenceMismatch": Guidance(
        harm="Gradients are biased: the reward may rise for a while and then collapse. Critical: "
        "stop, since trainer and sampler are different policies. Warning: investigate within "
        "hours.",
        query='increase(mp_agent_logprobs_mismatch_steps_total{run="RUN"}[1h])',
        reading="On how many steps of the last hour trainer and sampler differed, by level. "
        "mp_agent_logprobs_k3 says by how much, in nats per token: 0 in the same arithmetic, and "
        "little where the two only round differently.",
        causes=(
            "The sampler computes in another precision or with other kernels, or is quantized.",
            "The sampler has older weights: their transfer failed, or rollouts are asynchronous.",
            "Temperature, top-k, top-p or a padding token is applied on one side only.",
            "Log-probabilities and mask are shifted by a token against each other.",
            "A router of experts chooses other experts on the two sides.",
        ),
        false_positives=(
            "Log-probabilities of the trainer after further updates on the same rollouts, as in "
            "later epochs of PPO: report those from before the first update.",
            "A model of a few thousand parameters in tests, whose probabilities jump about.",
        ),
        samples=("compare_logprobs",),
        panels=(panels.LOGPROB_KL, panels.LOGPROB_DELTA, panels.LOGPROB_WEIGHTS),
    ),
}


OPTIMIZER = {
    "MpAgentSecondMomentStale": Guidance(
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
        samples=("faster_second_moment",),
        panels=(panels.SECOND_MOMENT, panels.UPDATE_SIZE, panels.LOSS),
    ),
    "MpAgentUpdatesLost": Guidance(
        harm="The run goes on and learns less than it could, or nothing. Investigate during "
        "working hours; the computing time until then is largely wasted.",
        query='mp_agent_updates_lost_ratio{run="RUN"}',
        reading="The share of the weights in at most 16 bits that the last sampled step was to "
        "change and did not. It grows as the learning rate decays.",
        causes=(
            "The model was cast to BF16 or FP16 as a whole, so that the optimizer steps 16-bit "
            "weights without an FP32 copy.",
            "The learning rate is small for the spacing of the weights' format.",
        ),
        false_positives=(
            "The first steps of a warm-up, whose learning rate is almost 0.",
            "An optimizer that carries the rounding error along: the weights change later.",
        ),
        samples=("master_weights",),
        panels=(panels.ROUNDED_UPDATES, panels.UPDATE_SIZE, panels.LEARNING_RATE),
    ),
    "MpAgentAdamEpsilonUnsafe": Guidance(
        harm="Updates are far smaller than intended, or at risk of becoming infinite. Look during "
        "working hours; at once where the state is in FP16.",
        query='mp_agent_adam_below_epsilon_ratio{run="RUN"} or '
        'mp_agent_adam_epsilon_lost_ratio{run="RUN"}',
        reading="The first is the share of elements whose second moment is below epsilon; the "
        "second is the share whose state's format cannot hold epsilon, 0 or 1 in most runs.",
        causes=(
            "The optimizer's state is in FP16, because the model was cast by half().",
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
}
