"""Static facts of a run for the info metrics: strategy, precision, device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mp_agent.probe.optimizers.formats import format_name, formats_of
from mp_agent.probe.optimizers.plan import MeasurementPlan


@dataclass(slots=True)
class ObservedTraits:
    """Facts of the run that the hooks have observed."""

    autocast_dtype: torch.dtype | None = None
    scaler_name: str = ""
    measuring_point: str = "optimizer_step"
    reduced_by_ddp: bool = False


def facts_of(
    plans: Sequence[MeasurementPlan], traits: ObservedTraits
) -> tuple[tuple[str, str], ...]:
    """Return the schema's facts."""
    first = plans[0]
    strategies = {plan.strategy for plan in plans}
    return (
        ("strategy", strategies.pop() if len(strategies) == 1 else "mixed"),
        ("precision", format_name(traits.autocast_dtype or first.compute_dtype)),
        ("scaler", traits.scaler_name),
        ("measuring_point", traits.measuring_point),
        ("device", str(first.device)),
        ("gpu_uuid", _gpu_uuid(first.device)),
        *formats_of(plans, traits.autocast_dtype),
    )


def _gpu_uuid(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
