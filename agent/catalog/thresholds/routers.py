"""Limits of the routers of mixtures of experts."""

from mp_agent.catalog.thresholds.threshold import Threshold

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
