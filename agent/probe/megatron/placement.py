"""Over which ranks the parts of a Megatron model's parameters lie.

Ranks that reduce a gradient together are those of the bucket that the wrapper has put it in. Ranks
that split a tensor are those of the optimizer's tensor parallel group, and for experts those that
Megatron's `parallel_state` names; it also answers where a model has no wrapper of Megatron's. A
parameter that no attribute marks as split is the same on all ranks of the tensor parallel group.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mp_agent.probe.megatron.gradients import GradientPart, Hold
from mp_agent.probe.placement import dtensor, megatron, this_rank
from mp_agent.probe.placement.axes import Grid, PlacementAxis, Spread
from mp_agent.records.schema import Share


class BucketGroups:
    """The group of buckets in which each parameter's gradient is reduced, by Megatron's wrapper."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._by_parameter: dict[int, Any] = {}
        for module in modules:
            groups = vars(module).get("param_to_bucket_group")
            if isinstance(groups, dict):
                self._by_parameter.update((id(each), group) for each, group in groups.items())

    def reducing(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the ranks that reduce a gradient together; none where they are not known."""
        group = self._by_parameter.get(id(parameter))
        for name in ("intra_distributed_optimizer_instance_group", "data_parallel_group"):
            if (found := getattr(group, name, None)) is not None:
                return ranks_of(found)
        return ()

    def instances(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the ranks that hold the same slice, of several distributed optimizers."""
        group = self._by_parameter.get(id(parameter))
        return ranks_of(getattr(group, "inter_distributed_optimizer_instance_group", None))


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group; none for None."""
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def axes_of(part: GradientPart, buckets: BucketGroups) -> list[PlacementAxis]:
    """Return the axes of a part; those along which there is one rank are left out."""
    found = [_tensor_axis(part), *_reduction_axes(part, buckets)]
    return [axis for axis in found if axis is not None and len(axis.ranks) > 1]


def share_of(part: GradientPart, axes: Sequence[PlacementAxis]) -> Share:
    """Return this rank's share of a parameter of which it steps a part."""
    parameter = part.parameter
    if isinstance(parameter, DTensor):
        return dtensor.grid_of(parameter, this_rank(), fsdp=True).share()
    grid = Grid(this_rank())
    for axis in axes:
        grid = grid.crossed_by(axis)
    return grid.share()


def strategy_of(axes: Iterable[PlacementAxis], parameters: Iterable[torch.Tensor]) -> str:
    """Return what splits and copies the model, such as dp+tp or pp+zero1; none for one rank.

    dp: copies. zero1, layer_wise: parts of the optimizer. pp, cp, ep: stages, contexts, experts.
    """
    kinds = {axis.source for axis in axes} | set(_model_parallel())
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        kinds.add("fsdp2")
    return "+".join(sorted(kinds)) or "none"


def _tensor_axis(part: GradientPart) -> PlacementAxis | None:
    parameter: Any = part.parameter
    if megatron.is_expert(parameter):
        ranks = megatron.expert_shards()
    elif hasattr(part.leaf, "tp_group"):
        ranks = ranks_of(part.leaf.tp_group)
    else:
        ranks = megatron.dense_shards()
    if not megatron.is_tensor_parallel(parameter):
        return PlacementAxis(Spread.COPIED, ranks, "tp") if ranks else None
    dimension = getattr(parameter, "partition_dim", -1)
    known = isinstance(dimension, int) and dimension >= 0
    return PlacementAxis(Spread.SPLIT, ranks, "tp", str(dimension) if known else "")


def _reduction_axes(part: GradientPart, buckets: BucketGroups) -> Iterator[PlacementAxis]:
    """Yield the axes along which gradients are reduced."""
    parameter, hold = part.parameter, part.hold
    if isinstance(parameter, DTensor):
        return
    ranks = buckets.reducing(parameter) or megatron.copies(parameter)
    if hold is Hold.COPIED:
        yield PlacementAxis(Spread.COPIED, ranks, hold.value)
        return
    yield PlacementAxis(Spread.SPLIT, ranks, hold.value, "0")
    yield PlacementAxis(Spread.COPIED, buckets.instances(parameter), Hold.COPIED.value)


_SIZES: Mapping[str, str] = {
    "pp": "get_pipeline_model_parallel_world_size",
    "cp": "get_context_parallel_world_size",
    "ep": "get_expert_model_parallel_world_size",
}


def _model_parallel() -> Iterator[str]:
    """Yield the kinds of model parallelism that Megatron's global groups have several ranks of."""
    groups = sys.modules.get("megatron.core.parallel_state")
    for kind, name in _SIZES.items():
        try:
            several = getattr(groups, name)() > 1
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):
            continue  # not initialised
        if several:
            yield kind
