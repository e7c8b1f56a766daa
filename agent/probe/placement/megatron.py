"""Shards and replicas, from the attributes that Megatron gives to parameters.

The model's parameter behind a tensor of Megatron's optimizers.
Megatron steps FP32 copies of 16-bit parameters, which these name as `main_param`. Its distributed
optimizer steps flat slices instead, this rank's part of each parameter: of the copy, which the
parameter then marks by `main_param_sharded`, or of the parameter itself, as a view.

Axes from the attributes that Megatron-LM and compatible frameworks set on parameters.
`tensor_model_parallel` marks a shard of a tensor; a parameter without it is the same on all ranks
of the tensor parallel group (also one with `sequence_parallel`, whose gradients are summed over
that group before the step). `allreduce=False` marks an expert, which has its own groups.
`shared` marks a copy that another pipeline stage counts. The groups are those of Megatron's
`parallel_state`, when the process has loaded and initialised it. Its distributed optimizer steps
slices of the parameters, which the data parallel ranks share among them: see `megatron_masters`.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mp_agent.probe.placement.axes import PlacementAxis, Spread
from mp_agent.ring.interruptions import pass_on


class MasterOrigin(NamedTuple):
    """What a tensor of the optimizer stands for."""

    parameter: torch.Tensor
    """Parameter of the model, with Megatron's attributes."""
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


_MODULES = ("megatron.core.parallel_state", "megatron.core.mpu", "megatron.mpu")

Query = tuple[str, Mapping[str, bool]]
"""A function of `parallel_state` that returns a group, and its arguments."""

_DENSE_SHARDS: tuple[Query, ...] = (("get_tensor_model_parallel_group", {}),)
_DENSE_COPIES: tuple[Query, ...] = (
    ("get_data_parallel_group", {"with_context_parallel": True}),
    ("get_data_parallel_group", {}),
)
_DENSE_SLICES: tuple[Query, ...] = (
    ("get_data_parallel_group", {"with_context_parallel": True, "partial_data_parallel": True}),
    *_DENSE_COPIES,
)
_EXPERT_SHARDS: tuple[Query, ...] = (("get_expert_tensor_parallel_group", {}),)
_EXPERT_COPIES: tuple[Query, ...] = (
    ("get_expert_data_parallel_group", {}),
    ("get_data_modulo_expert_parallel_group", {}),
)
_EXPERT_SLICES: tuple[Query, ...] = (
    ("get_expert_data_parallel_group", {"partial_expert_data_parallel": True}),
    *_EXPERT_COPIES,
)
_INSTANCES: tuple[Query, ...] = (("get_inter_distributed_optimizer_instance_group", {}),)
"""The groups of shards, of copies, of slices, and of optimizers that hold the same slices; of each
group the functions that give it, the newest first."""


def is_shared_copy(parameter: torch.Tensor) -> bool:
    """Return whether another stage counts this tensor."""
    return getattr(parameter, "shared", False) is True


def is_expert(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is left out of the data parallel reduction."""
    return getattr(parameter, "allreduce", True) is False


def is_tensor_parallel(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is this rank's shard of a tensor."""
    return getattr(parameter, "tensor_model_parallel", False) is True


def is_loaded() -> bool:
    """Return whether this process has loaded Megatron's groups."""
    return any(name in sys.modules for name in _MODULES)


def model_parameters(
    tensors: Sequence[torch.Tensor], modules: Iterable[nn.Module]
) -> list[torch.Tensor]:
    """Return, for each tensor of an optimizer, the model's parameter that it is stepped for."""
    if not is_loaded():
        return list(tensors)
    masters = origins_by_master(modules)
    origins = [origin_of(tensor, masters) for tensor in tensors]
    return [
        tensor if origin is None else origin.parameter
        for tensor, origin in zip(tensors, origins, strict=True)
    ]


def axes_of(
    parameter: torch.Tensor, masters: Mapping[int, MasterOrigin] | None = None
) -> Iterator[PlacementAxis]:
    """Yield the axes of a parameter by its attributes and Megatron's groups; none without those.

    masters: the model's parameters behind the optimizer's own tensors, by `id` of the latter. Of a
    tensor of the optimizer that is missing there, it is not known whether it is a slice or a copy.
    """
    origin = origin_of(parameter, masters or {})
    if origin is None and not isinstance(parameter, nn.Parameter):
        return
    model = parameter if origin is None else origin.parameter
    sliced = origin is not None and origin.sliced
    expert = is_expert(model)
    shards = expert_shards() if expert else dense_shards()
    if len(shards) > 1:
        dimension = getattr(model, "partition_dim", -1)
        if is_tensor_parallel(model):
            known = isinstance(dimension, int) and dimension >= 0
            yield PlacementAxis(Spread.SPLIT, shards, "tp", str(dimension) if known else "")
        else:
            yield PlacementAxis(Spread.COPIED, shards, "tp")
    if sliced:
        yield from _axes_of_slices(_EXPERT_SLICES if expert else _DENSE_SLICES)
        return
    if len(data_parallel := copies(model)) > 1:
        yield PlacementAxis(Spread.COPIED, data_parallel, "dp")


def dense_shards() -> tuple[int, ...]:
    """Return the ranks among which tensors are split."""
    return _ranks_of_first(_DENSE_SHARDS)


def expert_shards() -> tuple[int, ...]:
    """Return the ranks among which the tensors of experts are split."""
    return _ranks_of_first(_EXPERT_SHARDS)


def data_ranks() -> tuple[int, ...]:
    """Return the ranks that get different data; those that split sequences get the same."""
    return _ranks_of_first((("get_data_parallel_group", {}),))


def copies(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the ranks that have copies of a parameter and reduce its gradient."""
    return _ranks_of_first(_EXPERT_COPIES if is_expert(parameter) else _DENSE_COPIES)


def _axes_of_slices(queries: tuple[Query, ...]) -> Iterator[PlacementAxis]:
    slices, instances = _ranks_of_first(queries), _ranks_of_first(_INSTANCES)
    if len(slices) > 1:
        yield PlacementAxis(Spread.SPLIT, slices, "zero1", "0")
    if len(instances) > 1:
        yield PlacementAxis(Spread.COPIED, instances, "dp")


def _ranks_of_first(queries: tuple[Query, ...]) -> tuple[int, ...]:
    """Return the ranks of the first group that one of these functions gives."""
    for module in filter(None, map(sys.modules.get, _MODULES)):
        for name, arguments in queries:
            try:
                group = getattr(module, name)(**arguments)
                return tuple(dist.get_process_group_ranks(group))
            except (
                AttributeError,
                AssertionError,
                TypeError,
                ValueError,
                RuntimeError,
                KeyError,
            ) as error:
                pass_on(error)
                continue  # not in this release, or not initialised
    return ()
