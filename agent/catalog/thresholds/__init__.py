"""Every number that a condition compares against, declared once.

The node agent counts against them (`mp_agent_grad_norm_exceeded_steps_total`), the conditions
catalog renders rules from them, dashboards draw them. The setting `thresholds` overrides by name.
"""

from collections.abc import Mapping

from mp_agent.catalog.thresholds.tensors import (
    ACTIVATION_THRESHOLDS,
    FP8_THRESHOLDS,
    GRADIENT_THRESHOLDS,
    REINFORCEMENT_THRESHOLDS,
    ROUTER_THRESHOLDS,
    TENSOR_THRESHOLDS,
)
from mp_agent.catalog.thresholds.training import (
    LOSS_SCALE_THRESHOLDS,
    OPTIMIZER_THRESHOLDS,
    RUN_THRESHOLDS,
    TRAINING_THRESHOLDS,
    Threshold,
)
from mp_agent.errors import SettingError, unknown_name

__all__ = [
    "BY_NAME",
    "DEFAULTS",
    "THRESHOLDS",
    "Threshold",
    "bound_label",
    "level_label",
    "resolve",
]

THRESHOLDS = (
    *GRADIENT_THRESHOLDS,
    *OPTIMIZER_THRESHOLDS,
    *LOSS_SCALE_THRESHOLDS,
    *TRAINING_THRESHOLDS,
    *RUN_THRESHOLDS,
    *ACTIVATION_THRESHOLDS,
    *ROUTER_THRESHOLDS,
    *FP8_THRESHOLDS,
    *REINFORCEMENT_THRESHOLDS,
    *TENSOR_THRESHOLDS,
)
DEFAULTS: Mapping[str, float] = {threshold.name: threshold.value for threshold in THRESHOLDS}
BY_NAME: Mapping[str, Threshold] = {threshold.name: threshold for threshold in THRESHOLDS}


def resolve(overrides: Mapping[str, float]) -> dict[str, float]:
    """Return all thresholds with `overrides` applied.

    An unknown name, a value that is not above 0, a share above 1, and a limit that is not below
    the one that it belongs below raise SettingError.
    """
    for name, value in overrides.items():
        if name not in DEFAULTS:
            raise SettingError(f"thresholds: {unknown_name(name, DEFAULTS)}")
        if not 0 < value < float("inf"):
            raise SettingError(f"thresholds: {name} has value {value!r}; it must be above 0")
        if BY_NAME[name].unit == "1" and value > 1:
            raise SettingError(f"thresholds: {name} has value {value!r}; it is a share, at most 1")
    values = {**DEFAULTS, **overrides}
    for threshold in THRESHOLDS:
        name, upper = threshold.name, threshold.below
        if upper and values[name] >= values[upper]:
            raise SettingError(
                f"thresholds: {name} has value {values[name]!r}; it must be below {upper}, "
                f"which is {values[upper]!r}"
            )
    return values


def level_label(name: str) -> str:
    """Return what stands for a threshold in a label: the level that its name ends with.

    The same whatever the number is: a job with thresholds of its own is found by the same rules.
    """
    return name.rpartition("_")[2]


def bound_label(value: float) -> str:
    """Return a threshold as texts have it: `100`, `0.001`, `1e-06`."""
    return f"{value:g}"
