"""Limits of the optimizer's state, and of updates that are lost to rounding."""

from mp_agent.catalog.thresholds.threshold import Threshold

OPTIMIZER_THRESHOLDS = (
    Threshold(
        name="moment_rms_high",
        value=2.3,
        unit="{factor}",
        meaning="root of the mean of squared gradients divided by Adam's second moment, of a "
        "layer, from which the moments are out of date",
    ),
    Threshold(
        name="moment_rms_samples",
        value=2.0,
        unit="{sample}",
        meaning="consecutive samples with such a root",
    ),
    Threshold(
        name="updates_lost",
        value=0.5,
        unit="1",
        meaning="share of the updates of 16-bit weights whose loss in rounding stops learning",
    ),
    Threshold(
        name="adam_below_epsilon",
        value=0.5,
        unit="1",
        meaning="share of elements whose second moment is below epsilon that is unsafe",
    ),
)
