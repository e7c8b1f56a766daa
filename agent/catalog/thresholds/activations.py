"""Limits of outputs of modules, attention logits among them."""

from mp_agent.catalog.thresholds.threshold import Threshold

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
