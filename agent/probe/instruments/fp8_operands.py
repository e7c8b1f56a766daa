"""What FP8 makes of an operand, by its current or its delayed scale.

Scales and amax of layers that Transformer Engine casts with scales of earlier steps.
Its modules have a dict `fp8_meta`, whose `scaling_fwd` and `scaling_bwd` hold `scale` [N] and
`amax_history` [H, N], for N tensors. A pass writes amax into row 0; when it has ended, scales are
updated, row 0 becomes the last row, and is cleared.
"""

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
"""Format in which FP8 training holds an operand."""


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


def operand_row(tensor: torch.Tensor, operand: Operand, *, is_cast: bool = False) -> torch.Tensor:
    """Return float64 [C], the columns of `FP8`, on the device of `tensor`; NaN for those of others.

    tensor: as `usable` returns it. It is scaled as a whole, so that its largest finite magnitude
    becomes the format's largest number; the scale is not rounded. Counts of formats
    of up to 32 bits are exact. is_cast: whether the layer does so.
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
    if is_cast:
        found["cast_tensors"] = torch.ones_like(amax)
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


_LARGEST = {"fwd": E4M3.largest, "bwd": E5M2.largest}


@dataclass(frozen=True, slots=True)
class ScalingState:
    """One direction of a layer: the scales in force, the history of amax, the format's largest."""

    scale_N: torch.Tensor
    history_HN: torch.Tensor
    largest: float

    def row(self, amax_N: torch.Tensor) -> torch.Tensor:
        """Return float64 [C], the columns of `FP8`; tensors with an amax of 0 were not cast."""
        scale_N, amax_N = self.scale_N.double(), amax_N.double()
        cast_N = amax_N != 0.0
        sound_N = cast_N & amax_N.isfinite() & scale_N.isfinite()
        used_N = amax_N * scale_N / self.largest
        zero = torch.zeros((), dtype=torch.float64, device=scale_N.device)
        saturated_N = cast_N & ~(used_N <= 1.0 + _ROUNDING)
        none = ~sound_N.any()
        found = {
            "tensors": zero + cast_N.sum(),
            "scaled_tensors": zero + cast_N.sum(),
            "saturated_tensors": zero + saturated_N.sum(),
            "range_used_max": _largest(used_N, sound_N).masked_fill(none, nan),
            "range_used_min": _smallest(used_N, sound_N).masked_fill(none, nan),
            "scale_min": _smallest(scale_N, sound_N).masked_fill(none, nan),
            "scale_max": _largest(scale_N, sound_N).masked_fill(none, nan),
            "amax_max": _largest(amax_N, sound_N).masked_fill(none, nan),
        }
        absent = torch.full_like(zero, nan)
        return torch.stack([found.get(name, absent) for name in FP8.names])


_ROUNDING = 2.0**-22
"""Of the scale, which is the format's largest number divided by an amax, in 32 bits."""


def has_delayed_scaling(module: nn.Module) -> bool:
    """Return whether a module is one of Transformer Engine's, with or without such a state yet."""
    return isinstance(getattr(module, "fp8_meta", None), dict)


def forward_row(module: nn.Module) -> torch.Tensor | None:
    """Return the row of a forward pass that has just called `module`; None without a state."""
    state = _state(module, "fwd")
    return None if state is None else state.row(state.history_HN[0])


def backward_scale(module: nn.Module) -> torch.Tensor | None:
    """Return a copy of the scales [N] with which the next backward pass casts; None without."""
    state = _state(module, "bwd")
    return None if state is None else state.scale_N.clone()


def backward_row(module: nn.Module, scale_N: torch.Tensor) -> torch.Tensor | None:
    """Return the row of the backward pass that has just ended, which cast with `scale_N`.

    None if the state has changed its shape, and where a history of one row has been cleared.
    """
    state = _state(module, "bwd")
    if state is None or state.scale_N.shape != scale_N.shape or len(state.history_HN) < 2:
        return None
    first_N, last_N = state.history_HN[0], state.history_HN[-1]
    amax_N = torch.where(first_N != 0.0, first_N, last_N)
    return ScalingState(scale_N, state.history_HN, state.largest).row(amax_N)


def _state(module: nn.Module, direction: str) -> ScalingState | None:
    meta = getattr(module, "fp8_meta", None)
    found = meta.get(f"scaling_{direction}") if isinstance(meta, dict) else None
    scale, history = getattr(found, "scale", None), getattr(found, "amax_history", None)
    if not isinstance(scale, torch.Tensor) or not isinstance(history, torch.Tensor):
        return None
    if history.dim() != 2 or not history.numel() or scale.shape != history.shape[1:]:
        return None
    largest = meta.get(f"fp8_max_{direction}") if isinstance(meta, dict) else None
    if not isinstance(largest, float | int) or largest <= 0:
        largest = _LARGEST[direction]
    return ScalingState(scale.detach(), history.detach(), float(largest))


def _largest(values_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
    return values_N.masked_fill(~mask_N, -torch.inf).amax()


def _smallest(values_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
    return values_N.masked_fill(~mask_N, torch.inf).amin()
