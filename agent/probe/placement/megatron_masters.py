"""The model's parameter behind a tensor of Megatron's optimizers.

Megatron steps FP32 copies of 16-bit parameters, which these name as `main_param`. Its distributed
optimizer steps flat slices instead, this rank's part of each parameter: of the copy, which the
parameter then marks by `main_param_sharded`, or of the parameter itself, as a view.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn


class MasterOrigin(NamedTuple):
    """What a tensor of the optimizer stands for."""

    parameter: torch.Tensor
    """Of the model, with Megatron's attributes."""
    sliced: bool
    """Whether the optimizer holds a slice of it, and other ranks the rest."""


def origins_by_master(modules: Iterable[nn.Module]) -> Mapping[int, MasterOrigin]:
    """Return the parameters that name a tensor which is stepped for them, by `id` of the tensor."""
    found: dict[int, MasterOrigin] = {}
    for module in modules:
        for parameter in (vars(module).get("_parameters") or {}).values():
            master = getattr(parameter, "main_param", None)
            if isinstance(master, torch.Tensor):
                sliced = getattr(parameter, "main_param_sharded", False) is True
                found[id(master)] = MasterOrigin(parameter, sliced)
    return found


def origin_of(tensor: torch.Tensor, masters: Mapping[int, MasterOrigin]) -> MasterOrigin | None:
    """Return what a tensor of the optimizer stands for; None for a parameter of the model."""
    found = masters.get(id(tensor))
    if found is not None or isinstance(tensor, nn.Parameter):
        return found
    base = tensor._base if tensor.dim() == 1 and tensor._is_view() else None
    return MasterOrigin(base, sliced=True) if isinstance(base, nn.Parameter) else None
