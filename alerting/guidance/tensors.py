"""Runbook texts: tensors that the training script watches."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

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
