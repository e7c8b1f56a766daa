"""Static facts of a run for the info metrics: strategy, precision, device."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mp_agent.probe.optimizers.formats import GradientFormats, format_name, formats_of
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.records.tensor_collections import FACT as COLLECTIONS_FACT

_PATH_LENGTH_MAX = 4096


@dataclass(slots=True)
class ObservedTraits:
    """Facts of the run that the hooks have observed."""

    autocast_dtype: torch.dtype | None = None
    gradient_formats: GradientFormats = field(default_factory=GradientFormats)
    scaler_name: str = ""
    measuring_point: str = "optimizer_step"
    reduced_by_ddp: bool = False
    fp8_library: str = ""
    """Which library casts layers to FP8."""
    script: str = ""
    """The main script, for the node agent to check; empty: it is not to be checked."""
    collections: str = ""
    """The tensor collections that the script has defined; empty: none."""


def facts_of(
    plans: Sequence[MeasurementPlan], traits: ObservedTraits
) -> tuple[tuple[str, str], ...]:
    """Return the schema's facts."""
    first = plans[0]
    strategies = {plan.strategy for plan in plans}
    script = (("script", traits.script),) if traits.script else ()
    collections = ((COLLECTIONS_FACT, traits.collections),) if traits.collections else ()
    return (
        ("strategy", strategies.pop() if len(strategies) == 1 else "mixed"),
        ("precision", format_name(traits.autocast_dtype or first.compute_dtype)),
        ("scaler", traits.scaler_name),
        ("measuring_point", traits.measuring_point),
        ("device", str(first.device)),
        ("gpu_uuid", _gpu_uuid(first.device)),
        *script,
        *collections,
        *formats_of(plans, traits.gradient_formats, traits.autocast_dtype),
        ("fp8_library", traits.fp8_library),
    )


def main_script() -> str:
    """Return the path of the program's file; "" for a prompt or notebook, and for odd paths."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        path = os.path.abspath(path) if isinstance(path, str) else ""
        path.encode()
    except (OSError, ValueError):  # the working directory is gone; a name that is no text
        return ""
    return path if len(path) <= _PATH_LENGTH_MAX else ""


def _gpu_uuid(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
