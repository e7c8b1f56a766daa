"""Scales and amax of layers that Transformer Engine casts with scales of earlier steps.

Its modules have a dict `fp8_meta`, whose `scaling_fwd` and `scaling_bwd` hold `scale` [N] and
`amax_history` [H, N], for N tensors. A pass writes amax into row 0; when it has ended, scales are
updated, row 0 becomes the last row, and is cleared.
"""

from dataclasses import dataclass
from math import nan

import torch
from torch import nn

from mp_agent.probe.fp8.operands import E4M3, E5M2
from mp_agent.records.columns import FP8

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
