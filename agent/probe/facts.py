"""What kind of run it is: strategy, precision, device; static facts for the info metrics."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from mp_agent.probe.plan import Plan
from mp_agent.records.schema import Share

_SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(slots=True)
class Traits:
    """What the hooks have learned of the run by its first step."""

    autocast_dtype: torch.dtype | None = None
    scaler_name: str = ""
    measuring_point: str = "optimizer_step"


def facts_of(plan: Plan, traits: Traits) -> tuple[tuple[str, str], ...]:
    """Return the schema's facts."""
    return (
        ("strategy", _strategy(plan)),
        ("precision", _precision(traits.autocast_dtype or plan.compute_dtype)),
        ("scaler", traits.scaler_name),
        ("measuring_point", traits.measuring_point),
        ("device", str(plan.device)),
        ("gpu_uuid", _gpu_uuid(plan.device)),
    )


def _strategy(plan: Plan) -> str:
    """Return none, ddp or fsdp2, or mixed when the parameters are not all of one kind."""
    kinds = {
        _kind(parameter, plan.shares[layer.share])
        for parameter, layer in zip(plan.parameters, plan.layers, strict=True)
    }
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _kind(parameter: torch.Tensor, share: Share) -> str:
    if isinstance(parameter, DTensor):
        return "fsdp2"
    return "ddp" if share.replica_count > 1 else "none"


def _precision(dtype: torch.dtype) -> str:
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _gpu_uuid(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
