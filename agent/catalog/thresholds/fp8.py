"""Limits of the scales with which layers in FP8 cast."""

from mp_agent.catalog.thresholds.threshold import Threshold

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
        name="fp8_scaling_samples",
        value=3.0,
        unit="{sample}",
        meaning="consecutive samples beyond one of these, after which a layer counts as misscaled",
    ),
)
