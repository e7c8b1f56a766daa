"""Thresholds of gradients, activations, FP8, routers, watched tensors and policies."""

from mp_agent.catalog.thresholds.training import Threshold

GRADIENT_THRESHOLDS = (
    Threshold(
        name="grad_norm_high",
        value=100.0,
        unit="{norm}",
        meaning="gradient norm above which to check clipping and the learning rate",
        below="grad_norm_extreme",
    ),
    Threshold(
        name="grad_norm_extreme",
        value=1000.0,
        unit="{norm}",
        meaning="gradient norm that damages the weights in a single step",
    ),
    Threshold(
        name="grad_norm_growth",
        value=10.0,
        unit="{factor}",
        meaning="gradient norm, divided by the run's usual one, from which a large norm counts "
        "as explosion",
    ),
    Threshold(
        name="grad_norm_usual_growth",
        value=30.0,
        unit="{factor}",
        meaning="usual gradient norm, divided by the run's lowest usual one, that neither the "
        "learning rate nor the beginning of the run explains",
    ),
    Threshold(
        name="grad_norm_fall",
        value=0.01,
        unit="1",
        meaning="share of the run's largest usual norm above which a small norm counts as normal",
    ),
    Threshold(
        name="grad_norm_low",
        value=0.01,
        unit="{norm}",
        meaning="gradient norm below the healthy range of 0.1 to 10",
    ),
    Threshold(
        name="grad_norm_very_low",
        value=0.001,
        unit="{norm}",
        meaning="gradient norm at which learning nearly stops",
        below="grad_norm_low",
    ),
    Threshold(
        name="grad_norm_vanished",
        value=1e-6,
        unit="{norm}",
        meaning="gradient norm of a model that no longer learns",
        below="grad_norm_very_low",
    ),
    Threshold(
        name="grad_norm_low_steps",
        value=1800.0,
        unit="{step}",
        meaning="consecutive steps with a norm below grad_norm_low: the weaker the evidence, the "
        "more",
    ),
    Threshold(
        name="grad_norm_very_low_steps",
        value=600.0,
        unit="{step}",
        meaning="consecutive steps with a norm below grad_norm_very_low",
        below="grad_norm_low_steps",
    ),
    Threshold(
        name="grad_norm_vanished_steps",
        value=120.0,
        unit="{step}",
        meaning="consecutive steps with a norm below grad_norm_vanished",
        below="grad_norm_very_low_steps",
    ),
    Threshold(
        name="sustained_steps",
        value=300.0,
        unit="{step}",
        meaning="steps over which all samples must be beyond a limit, since one batch can be odd",
    ),
    Threshold(
        name="layer_dead_abs_max",
        value=1e-10,
        unit="{gradient}",
        meaning="largest gradient magnitude of a layer that no longer learns",
    ),
    Threshold(
        name="layer_dead_samples",
        value=3.0,
        unit="{sample}",
        meaning="consecutive samples below layer_dead_abs_max from which a layer is dead",
    ),
    Threshold(
        name="layer_fall",
        value=0.001,
        unit="1",
        meaning="share of a layer's first gradients below which a tiny gradient is dead",
    ),
    Threshold(
        name="layer_growth",
        value=100.0,
        unit="{factor}",
        meaning="norm of a layer, divided by its usual one and by that of other layers, that is "
        "explosion",
    ),
    Threshold(
        name="layer_zero_rise",
        value=0.2,
        unit="1",
        meaning="increase of a gradient's zero share over its early level that is underflow",
    ),
    Threshold(
        name="underflow_layers",
        value=0.05,
        unit="1",
        meaning="share of underflowing layers from which learning suffers",
    ),
    Threshold(
        name="layer_flushed",
        value=0.31,
        unit="1",
        meaning="share of a layer's gradient elements below FP16's smallest number that is "
        "underflow",
    ),
    Threshold(
        name="fp16_flushed",
        value=0.05,
        unit="1",
        meaning="share of the non-zero gradients that FP16 rounds to zero from which a larger "
        "loss scale is needed",
    ),
    Threshold(
        name="fp16_headroom_bits",
        value=1.0,
        unit="{bit}",
        meaning="headroom below which the next doubling of the loss scale overflows",
    ),
)


ACTIVATION_THRESHOLDS = (
    Threshold(
        name="fp16_near_overflow",
        value=60_000.0,
        unit="{activation}",
        meaning="magnitude above which an element of an FP16 output counts as close to overflow, "
        "which is at 65 504",
    ),
    Threshold(
        name="attention_logit_high",
        value=100.0,
        unit="{logit}",
        meaning="attention logit above which growth is a warning: softmax is saturated",
    ),
    Threshold(
        name="logsumexp_high",
        value=100.0,
        unit="{logit}",
        meaning="magnitude of the output logits' log-sum-exp above which growth is a warning",
    ),
    Threshold(
        name="logit_growth",
        value=2.0,
        unit="{factor}",
        meaning="logits, divided by those of the run's past, that have grown",
    ),
)


FP8_THRESHOLDS = (
    Threshold(
        name="fp8_range_used_high",
        value=4.0,
        unit="{factor}",
        meaning="amax times scale, divided by FP8's largest number (448 in E4M3, 57344 in E5M2), "
        "beyond what a scale from earlier steps misses now and then",
    ),
    Threshold(
        name="fp8_range_used_low",
        value=6.1e-5,
        unit="{factor}",
        meaning="the same, about 2⁻¹⁴, where fewer than four of E4M3's 18 binades are left for a "
        "tensor",
        below="fp8_range_used_high",
    ),
    Threshold(
        name="fp8_flushed",
        value=0.5,
        unit="1",
        meaning="share of the non-zero elements of an input or a weight that its cast to FP8 "
        "rounds to zero, above which the layer hardly sees it",
    ),
    Threshold(
        name="fp8_scaling_samples",
        value=3.0,
        unit="{sample}",
        meaning="consecutive samples beyond one of these, after which a layer counts as misscaled",
    ),
)


ROUTER_THRESHOLDS = (
    Threshold(
        name="router_entropy_low",
        value=0.25,
        unit="1",
        meaning="entropy of a router, of 0 to 1, below which it decides for few experts alone",
    ),
    Threshold(
        name="router_load_high",
        value=3.0,
        unit="{factor}",
        meaning="load of a router's most loaded expert, divided by the mean over its experts, that "
        "is far from even",
    ),
    Threshold(
        name="router_collapse_samples",
        value=3.0,
        unit="{sample}",
        meaning="consecutive samples with both, after which a router counts as collapsed",
    ),
)


TENSOR_THRESHOLDS = (
    Threshold(
        name="reduction_swallowed",
        value=0.01,
        unit="1",
        meaning="share of the terms of a watched sum that is lost in its dtype, above which the "
        "sum is wrong by more than rounding",
    ),
    Threshold(
        name="dimension_imbalance",
        value=1e4,
        unit="{factor}",
        meaning="largest range of a slice of a watched tensor, divided by the smallest, above "
        "which 16 bits lose the smaller ones",
    ),
)


REINFORCEMENT_THRESHOLDS = (
    Threshold(
        name="logprob_k3_high",
        value=0.01,
        unit="{nat}",
        meaning="k3 estimate of the KL divergence of sampler and trainer that rounding in 16 bits "
        "alone seldom reaches",
        below="logprob_k3_extreme",
    ),
    Threshold(
        name="logprob_k3_extreme",
        value=0.1,
        unit="{nat}",
        meaning="k3 estimate at which sampler and trainer are different policies",
    ),
    Threshold(
        name="logprob_delta_tail",
        value=0.1,
        unit="{nat}",
        meaning="difference of the log-probabilities that one token in a thousand must exceed: a "
        "k3 estimate of a few extreme tokens alone is not judged",
    ),
    Threshold(
        name="logprob_steps",
        value=3.0,
        unit="{step}",
        meaning="steps within logprob_window on which trainer and sampler must differ",
    ),
    Threshold(
        name="policy_entropy_fallen",
        value=0.05,
        unit="1",
        meaning="share of a policy's highest entropy below which next to nothing is tried any more",
    ),
    Threshold(
        name="policy_entropy_steps",
        value=16.0,
        unit="{step}",
        meaning="compared steps in a row with so little entropy after which a policy has collapsed",
    ),
)
