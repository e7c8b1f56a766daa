"""Single numbers out of training's hands: a float where that is free, else left on its device."""

from numbers import Real
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

Scalar: TypeAlias = float | torch.Tensor
"""A float, or a 0-dim tensor on a device whose reading would make the host wait."""


def scalar_of(value: object) -> Scalar | None:
    """Return `value` as a scalar without waiting for a device; None when it is no single number.

    A DTensor counts when it is replicated: anything else would need a collective.
    """
    if isinstance(value, Real):
        return float(value)
    if not isinstance(value, torch.Tensor) or value.is_complex():
        return None
    local = local_of(value.detach())
    if local is None or local.numel() != 1:
        return None
    return float(local) if local.device.type == "cpu" else local.reshape(())


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a plain tensor itself, of a replicated DTensor the local copy, else None."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        return None
    return tensor.to_local()


def add(total: Scalar | None, value: Scalar) -> Scalar:
    """Return the sum in double precision, on the device if either is there."""
    if isinstance(value, torch.Tensor):
        value = value.to(torch.float64)
    return value if total is None else total + value


def reciprocal(value: Scalar) -> Scalar:
    """Return 1 / value in double precision."""
    return value.to(torch.float64).reciprocal() if isinstance(value, torch.Tensor) else 1.0 / value
