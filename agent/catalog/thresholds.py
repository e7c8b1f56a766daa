"""Every number that a condition compares against, declared once.

The node agent counts against them (`mp_agent_grad_norm_exceeded_steps_total`), the conditions
catalog renders rules from them, dashboards draw them. The setting `thresholds` overrides by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mp_agent.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A default limit with its unit and meaning."""

    name: str
    value: float
    unit: str
    meaning: str


THRESHOLDS = (
    Threshold(
        name="grad_norm_high",
        value=100.0,
        unit="{norm}",
        meaning="gradient norm above which clipping or the learning rate needs a look",
    ),
    Threshold(
        name="grad_norm_extreme",
        value=1000.0,
        unit="{norm}",
        meaning="gradient norm that wrecks the weights in a step",
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
        meaning="gradient norm at which learning all but stops",
    ),
    Threshold(
        name="grad_norm_vanished",
        value=1e-6,
        unit="{norm}",
        meaning="gradient norm of a model that no longer learns",
    ),
    Threshold(
        name="loss_scale_low",
        value=128.0,
        unit="{scale}",
        meaning="loss scale that, while still falling, leaves FP16 too little range",
    ),
    Threshold(
        name="loss_scale_floor",
        value=1.0,
        unit="{scale}",
        meaning="loss scale at which GradScaler no longer helps",
    ),
    Threshold(
        name="overflow_warning",
        value=0.01,
        unit="1",
        meaning="skipped steps per attempted step; healthy is 1 in 2000",
    ),
    Threshold(
        name="overflow_critical",
        value=0.1,
        unit="1",
        meaning="skipped steps per attempted step at which training hardly advances",
    ),
    Threshold(
        name="calibration_steps",
        value=500.0,
        unit="{step}",
        meaning="steps in which GradScaler may still search for its scale",
    ),
    Threshold(
        name="loss_scale_net_decreases",
        value=3.0,
        unit="{change}",
        meaning="downward minus upward changes of the loss scale that make it a falling one",
    ),
    Threshold(
        name="floor_skips",
        value=3.0,
        unit="{step}",
        meaning="skipped steps at the loss scale's floor that say lowering it does not help",
    ),
    Threshold(
        name="floor_skip_share",
        value=0.03,
        unit="1",
        meaning="skipped steps at the floor per attempted step: 3 in 100",
    ),
    Threshold(
        name="overflow_rising",
        value=0.001,
        unit="1",
        meaning="skipped steps per attempted step above which a rising share is a warning",
    ),
    Threshold(
        name="overflow_skips",
        value=3.0,
        unit="{step}",
        meaning="skipped steps below which a share of slow steps says nothing",
    ),
    Threshold(
        name="nonfinite_losses",
        value=3.0,
        unit="{step}",
        meaning="non-finite losses at which skipping the steps no longer excuses them",
    ),
    Threshold(
        name="loss_deviations",
        value=3.0,
        unit="{deviation}",
        meaning="standard deviations above its mean that still are the loss's own baseline",
    ),
    Threshold(
        name="stall_steps",
        value=10.0,
        unit="{step}",
        meaning="usual step times that a pause must exceed to be a stall",
    ),
)

DEFAULTS: Mapping[str, float] = {threshold.name: threshold.value for threshold in THRESHOLDS}


def resolve(overrides: Mapping[str, float]) -> dict[str, float]:
    """Return all thresholds with `overrides` applied; an unknown or non-positive one is refused."""
    for name, value in overrides.items():
        if name not in DEFAULTS:
            raise SettingError(f"thresholds: {name!r} is unknown; known: {', '.join(DEFAULTS)}")
        if not 0 < value < float("inf"):
            raise SettingError(f"thresholds: {name} has value {value!r}; it must be above 0")
    return {**DEFAULTS, **overrides}


def bound_label(value: float) -> str:
    """Return a threshold as a label value: `100`, `0.001`, `1e-06`."""
    return f"{value:g}"
