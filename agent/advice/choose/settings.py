"""Settings for `mp_agent.init`: thresholds that fit the measured norms and the chosen scale."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from mp_agent.advice.choose.optimizer import rounded_up
from mp_agent.catalog.thresholds import DEFAULTS, resolve

_SCALE_PARTS = {"loss_scale_reduced": 4.0, "loss_scale_very_low": 64.0, "loss_scale_low": 512.0}
"""By what the initial scale is divided for each threshold, where the default is above that."""


def settings_for(norms: Sequence[float], loss_scale: float | None) -> dict[str, Any]:
    """Return the settings that this model needs; empty where the defaults fit.

    Thresholds of norms are moved where the usual norm of this model would fire them, and those of
    the loss scale where the initial one is already below them.
    """
    overrides = {**_norm_thresholds(norms), **_scale_thresholds(loss_scale)}
    if not overrides:
        return {}
    resolve(overrides)
    return {"thresholds": overrides}


def _norm_thresholds(norms: Sequence[float]) -> Mapping[str, float]:
    known = [norm for norm in norms if norm > 0]
    if not known:
        return {}
    usual, largest = median(known), max(known)
    if largest >= DEFAULTS["grad_norm_high"]:
        high = rounded_up(10 * largest)
        return {"grad_norm_high": high, "grad_norm_extreme": 10 * high}
    if usual <= DEFAULTS["grad_norm_low"]:
        low = usual / 10
        return {
            "grad_norm_low": _digits(low),
            "grad_norm_very_low": _digits(low / 10),
            "grad_norm_vanished": _digits(min(low / 100, DEFAULTS["grad_norm_vanished"])),
        }
    return {}


def _scale_thresholds(loss_scale: float | None) -> Mapping[str, float]:
    if loss_scale is None or loss_scale / 4 >= DEFAULTS["loss_scale_reduced"]:
        return {}
    parts = {name: loss_scale / part for name, part in _SCALE_PARTS.items()}
    floor = DEFAULTS["loss_scale_floor"]
    if parts["loss_scale_low"] <= floor:
        # So small a scale leaves no room for levels; the floor is then below all of them.
        parts["loss_scale_floor"] = parts["loss_scale_low"] / 2
    return {
        name: value if name == "loss_scale_floor" else min(value, DEFAULTS[name])
        for name, value in parts.items()
    }


def _digits(value: float) -> float:
    return float(f"{value:.1e}")
