"""What is known of the placement of a model's parameters, gathered once per plan."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mp_agent.probe.identity.world import this_rank
from mp_agent.probe.placement import dtensor, megatron
from mp_agent.probe.placement.axes import Grid, PlacementAxis
from mp_agent.probe.placement.data_parallel import axes_by_parameter
from mp_agent.probe.placement.declared import declarations
from mp_agent.probe.placement.megatron_masters import origins_by_master
from mp_agent.records.schema import Share

PARTIAL = "parameters with a partial placement"

ALONE = Share(group="single")

_EXPERT = re.compile(r"(^|[._])experts?([._\d]|$)")


class ParameterPlacement(NamedTuple):
    """The placement of one parameter."""

    share: Share | None
    """None when this rank's part is not to be counted."""
    sources: frozenset[str] = frozenset()
    """What the placement is known from; empty for a parameter that nothing explains."""
    unsupported: str = ""
    """Why it cannot be counted; empty when another rank counts it."""


class Survey:
    """Finds this rank's share of each parameter of a model."""

    def __init__(
        self, modules: Iterable[nn.Module], root: nn.Module | None, ranks_in_run: int
    ) -> None:
        self._rank = this_rank()
        self._ranks_in_run = ranks_in_run
        modules = tuple(modules)
        self._wrapped = axes_by_parameter(modules)
        self._masters = origins_by_master(modules) if megatron.is_loaded() else {}
        self._declared = declarations.by_parameter()
        model = () if root is None else tuple(root.modules())
        self._fsdp = any(isinstance(module, FSDPModule) for module in model)
        self._tensor_parallel = dtensor.TensorParallelMeshes(
            () if root is None else nn.Module.parameters(root), fsdp=self._fsdp
        )

    def placement_of(self, name: str, parameter: torch.Tensor) -> ParameterPlacement:
        """Return this rank's share of the parameter called `name`. Enters no collective."""
        declared = self._declared.get(id(parameter))
        if megatron.is_shared_copy(parameter) or (declared and not declared.counted):
            return ParameterPlacement(None)
        if isinstance(parameter, DTensor) and not dtensor.lies_whole(parameter):
            return ParameterPlacement(None, unsupported=PARTIAL)
        if self._ranks_in_run == 1 and not isinstance(parameter, DTensor):
            return ParameterPlacement(ALONE)
        grid = self._grid(parameter)
        if not grid.axes and not (declared and declared.own):
            return ParameterPlacement(_unwrapped(name, parameter))
        sources = frozenset(axis.source for axis in grid.axes) or frozenset({"declared"})
        return ParameterPlacement(grid.share(), sources)

    def _grid(self, parameter: torch.Tensor) -> Grid:
        if isinstance(parameter, DTensor):
            grid = dtensor.grid_of(parameter, self._rank, fsdp=self._fsdp)
        else:
            grid = Grid(self._rank)
        for axis in self._axes_beside(parameter, grid.home or frozenset({self._rank})):
            grid = grid.crossed_by(axis)
        return grid

    def _axes_beside(
        self, parameter: torch.Tensor, home: frozenset[int]
    ) -> Iterator[PlacementAxis]:
        """Yield the axes besides those of the tensor itself, the most certain first."""
        declared = self._declared.get(id(parameter))
        if declared is not None:
            yield from declared.axes
        if declared is not None and declared.own:
            return
        yield from self._wrapped.get(id(parameter), ())
        yield from self._tensor_parallel.copies_beside(home)
        if not isinstance(parameter, DTensor):
            yield from megatron.axes_of(parameter, self._masters)


_PLAIN, _EXPERTS, _SHARDS = "unwrapped", "unwrapped experts", "unwrapped shards"


def may_begin_alike(share: Share) -> bool:
    """Return whether ranks may hold equal tensors at first that are no copies: made by one seed."""
    return share.group.startswith((_EXPERTS, _SHARDS))


def _unwrapped(name: str, parameter: torch.Tensor) -> Share:
    """Return the share of a parameter among other ranks that nothing explains.

    The merge judges it by what the ranks hold: copies, or each rank's own. Of experts and shards
    by hand, equal weights at the beginning show nothing.
    """
    if megatron.is_expert(parameter) or _EXPERT.search(name):
        return Share(group=_EXPERTS, assumed=True)
    if megatron.is_tensor_parallel(parameter):
        return Share(group=_SHARDS, assumed=True)
    return Share(group=_PLAIN, assumed=True)
