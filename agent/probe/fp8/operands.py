"""What a cast to FP8 flushes to zero of one tensor; on an accelerator without waiting for it."""

from dataclasses import dataclass
from math import nan
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mp_agent.probe import accelerator
from mp_agent.probe.statistics.pieces import pieces, stored_values
from mp_agent.records.columns import FP8

_HOST_PIECE_ELEMENTS = 2**16
"""As float64 they fit the processor's cache."""
_DEVICE_PIECE_ELEMENTS = 2**22
"""Bounds the scratch on a device: each piece is widened to float64."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """largest: the largest finite number. zero_up_to: half of the smallest, which rounds to 0."""

    largest: float
    zero_up_to: float


E4M3 = Fp8Format(448.0, 2.0**-10)
E5M2 = Fp8Format(57344.0, 2.0**-17)

Operand = Literal["input", "weight", "gradient"]
FORMATS: dict[Operand, Fp8Format] = {"input": E4M3, "weight": E4M3, "gradient": E5M2}
"""In which format FP8 training holds an operand."""


def usable(value: object) -> torch.Tensor | None:
    """Return a tensor that can be measured, of a sharded one the local part; None for others."""
    if isinstance(value, DTensor):
        if any(each.is_partial() for each in value.placements):
            return None
        value = value.to_local()
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, nn.Parameter):
        return None
    if not value.is_floating_point() or value.layout is not torch.strided or value.is_nested:
        return None
    return value.detach() if value.numel() and accelerator.is_supported(value.device) else None


def operand_row(tensor: torch.Tensor, operand: Operand) -> torch.Tensor:
    """Return float64 [C], the columns of `FP8`, on the device of `tensor`; NaN for those of others.

    tensor: as `usable` returns it. It is scaled as a whole, so that its largest finite magnitude
    becomes the format's largest number; the scale is not rounded. Counts of formats
    of up to 32 bits are exact.
    """
    number_format = FORMATS[operand]
    values = stored_values(tensor)
    on_host = values.device.type == "cpu"
    parts = list(pieces(values, _HOST_PIECE_ELEMENTS if on_host else _DEVICE_PIECE_ELEMENTS))
    amax = torch.stack([_magnitudes(part).amax() for part in parts]).amax()
    # |x| * largest / amax <= zero_up_to, without the rounding of a division.
    limit = amax * number_format.zero_up_to
    counts = [
        torch.stack([finite.sum(), nonzero.sum(), flushed.sum()])
        for finite, nonzero, flushed in (
            _masks(part, number_format.largest, limit) for part in parts
        )
    ]
    finite, nonzero, flushed = torch.stack(counts).sum(dim=0).double().unbind()
    found = {
        "tensors": torch.ones_like(amax),
        "nonfinite_elements": values.numel() - finite,
        f"{operand}_elements": nonzero,
        f"{operand}_flushed_elements": flushed,
    }
    absent = torch.full_like(amax, nan)
    return torch.stack([found.get(name, absent) for name in FP8.names])


def _magnitudes(part: torch.Tensor) -> torch.Tensor:
    """Return float64 magnitudes, 0 for what is not finite."""
    values = part.double()
    return values.where(values.isfinite(), 0.0).abs()


def _masks(
    part: torch.Tensor, largest: float, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which elements are finite, which of them not zero, and which of those are flushed."""
    magnitudes = _magnitudes(part)
    nonzero = magnitudes > 0.0
    return part.isfinite(), nonzero, nonzero & (magnitudes * largest <= limit)
