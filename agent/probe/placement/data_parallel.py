"""Axes of parameters that a wrapper reduces: DistributedDataParallel, and FSDP1's units."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe.placement.axes import PlacementAxis, Spread


def axes_by_parameter(modules: Iterable[nn.Module]) -> Mapping[int, tuple[PlacementAxis, ...]]:
    """Return the axes of every parameter that a wrapper among `modules` reduces, by `id`."""
    found: dict[int, tuple[PlacementAxis, ...]] = {}
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            axis = PlacementAxis(Spread.COPIED, _ranks(module.process_group), "ddp")
            for name, parameter in nn.Module.named_parameters(module.module):
                if name not in module.parameters_to_ignore:
                    found[id(parameter)] = (axis,)
        handle = vars(module).get("_handle")
        if hasattr(handle, "flat_param"):  # FSDP1's FlatParamHandle, which is not public
            axes = tuple(_axes_of_unit(module, handle))
            found.update((id(parameter), axes) for parameter in _parameters_of(handle))
    return found


def _parameters_of(handle: Any) -> Iterator[torch.Tensor]:
    """Yield what an optimizer may hold of an FSDP1 unit: its flat parameter, or the originals."""
    yield handle.flat_param
    yield from getattr(handle.flat_param, "_params", None) or ()


def _axes_of_unit(module: nn.Module, handle: Any) -> Iterator[PlacementAxis]:
    across_nodes = vars(module).get("_inter_node_pg")
    if across_nodes is not None:
        yield PlacementAxis(Spread.COPIED, _ranks(across_nodes), "fsdp1")
    spread = Spread.SPLIT if handle.uses_sharded_strategy else Spread.COPIED
    yield PlacementAxis(
        spread, _ranks(handle.process_group), "fsdp1", "0" if spread is Spread.SPLIT else ""
    )


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
