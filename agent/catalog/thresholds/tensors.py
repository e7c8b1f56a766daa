"""Limits of watched tensors."""

from mp_agent.catalog.thresholds.threshold import Threshold

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
