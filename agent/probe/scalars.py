"""Single numbers of the training script: a float where that needs no sync, else on its device."""

from math import copysign, inf
from numbers import Real
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

from mp_agent.probe import accelerator

Scalar: TypeAlias = float | torch.Tensor
"""A float, or a 0-dim tensor on a device, where reading it would make the host wait."""


def scalar_of(value: object) -> Scalar | None:
    """Return `value` as a scalar without waiting for a device; None when it is no single number.

    A DTensor counts when it is replicated: anything else would need a collective.
    """
    if not isinstance(value, torch.Tensor):
        return float(value) if isinstance(value, Real) else None
    if value.is_complex():
        return None
    local = local_of(value.detach())
    if local is None or local.numel() != 1 or not accelerator.is_supported(local.device):
        return None
    return float(local) if accelerator.is_on_host(local.device) else local.reshape(())


def snapshot_of(value: object) -> Scalar | None:
    """Return `scalar_of(value)` as it is now, whatever is done to the tensor in place later.

    A loss scale is changed by `scaler.update()` before the step's numbers leave the device.
    """
    if type(value) is float or value is None:
        return value
    scalar = scalar_of(value)
    if isinstance(scalar, torch.Tensor):
        return scalar.to(torch.float64, copy=True)
    return scalar


class ScalarSnapshot:
    """The last snapshot of a tensor that is asked for several times between two changes."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None
        self._version = 0
        self._scalar: Scalar | None = None

    def of(self, value: object) -> Scalar | None:
        """Return `snapshot_of(value)`; the same one until torch counts a change of the tensor."""
        if not isinstance(value, torch.Tensor) or value.is_inference():
            return snapshot_of(value)
        version: int = value._version
        if value is not self._tensor or version != self._version:
            self._scalar = snapshot_of(value)
            self._tensor, self._version = value, version
        return self._scalar


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a plain tensor itself, of a replicated DTensor the local copy, else None."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        return None
    return tensor.to_local()


def add(total: Scalar | None, value: Scalar) -> Scalar:
    """Return the sum in double precision, on the device if either is there; on that of `total`."""
    if isinstance(value, torch.Tensor):
        device = total.device if isinstance(total, torch.Tensor) else value.device
        value = value.to(device, torch.float64, non_blocking=True, copy=total is None)
    return value if total is None else total + value


def reciprocal(value: Scalar) -> Scalar:
    """Return 1 / value in double precision; of 0, to which a loss scale can fall, infinity."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64).reciprocal()
    return 1.0 / value if value else copysign(inf, value)


def tighter(one: tuple[Scalar, Scalar], other: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
    """Return of two (limit, norm) of gradient clipping that which shrinks more.

    On the device of the first one, where both are on devices.
    """
    excess, other_excess = (norm * reciprocal(limit) for limit, norm in (one, other))
    if not isinstance(excess, torch.Tensor) and not isinstance(other_excess, torch.Tensor):
        return other if other_excess > excess else one
    if isinstance(excess, torch.Tensor) and isinstance(other_excess, torch.Tensor):
        other_excess = other_excess.to(excess.device, non_blocking=True)
    chosen = torch.as_tensor(other_excess > excess)
    limit, norm = (_where(chosen, *pair) for pair in zip(other, one, strict=True))
    return limit, norm


def _where(condition: torch.Tensor, one: Scalar, other: Scalar) -> torch.Tensor:
    """Return `one` where the condition holds, else `other`, without waiting for the device."""
    return torch.where(condition, _wide(one, condition), _wide(other, condition))


def _wide(value: Scalar, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(like.device, torch.float64, non_blocking=True)
    return torch.full_like(like, value, dtype=torch.float64)
