"""What a step sends from the device, and how it is put together again with what the host knows."""

from collections.abc import Mapping

import torch

from mp_agent.probe.scalars import Scalar
from mp_agent.probe.step.observed_step import ObservedStep
from mp_agent.records.steps import FloatArray
from mp_agent.ring.format.device_part import HostPart


def packed(
    step: ObservedStep, device: torch.device, *, with_totals: bool
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return one vector [N] on the device, and the names of the scalars in front.

    These are the scalars that are on a device; the scales that were not read follow them, and the
    totals, if they are to go along.
    """
    waiting = {
        name: value for name, value in step.scalars.items() if isinstance(value, torch.Tensor)
    }
    scales = [unread.inverse_scale for unread in step.unread_scales]
    parts = [
        value.to(device, torch.float64, non_blocking=True).reshape(1)
        for value in (*waiting.values(), *scales)
    ]
    if step.totals_GC is not None and with_totals:
        parts.append(step.totals_GC.reshape(-1))
    if not parts:
        return torch.empty(0, dtype=torch.float64, device=device), ()
    return torch.cat(parts), tuple(waiting)


def host_part(step: ObservedStep, names: tuple[str, ...], numbers: int) -> HostPart:
    """Return what the host knows of a step, and where `numbers` from the device have the rest.

    names: of the scalars in front of them; totals, where the device has them, are the last ones.
    """
    totals = len(names) + len(step.unread_scales)
    scalars = {
        name: value for name, value in step.scalars.items() if isinstance(value, float | int)
    }
    if step.totals_GC is not None and numbers == totals:
        # They are on the host: who reads this part has them no more.
        scalars["gradients_measured"] = 0.0
    return HostPart(
        sequence=step.sequence,
        step=step.step,
        time_unix_ns=step.time_unix_ns,
        scalars=scalars,
        places={name: place for place, name in enumerate(names)},
        numbers=numbers,
        totals_place=totals if numbers > totals else None,
    )


def on_host(
    scalars: Mapping[str, Scalar], names: tuple[str, ...], values_N: FloatArray
) -> dict[str, float]:
    """Return all scalars as floats: those called `names` from the front of `values_N`."""
    arrived = dict(zip(names, values_N.tolist(), strict=False))
    return {
        name: arrived[name] if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }
