"""Axes from the attributes that Megatron-LM and compatible frameworks set on parameters.

`tensor_model_parallel` marks a shard of a tensor; a parameter without it is the same on all ranks
of the tensor parallel group (also one with `sequence_parallel`, whose gradients are summed over
that group before the step). `allreduce=False` marks an expert, which has groups of its own.
`shared` marks a copy that another pipeline stage counts. The groups are those of Megatron's
`parallel_state`, when the process has loaded and initialised it.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from mp_agent.probe.placement.axes import PlacementAxis, Spread
from mp_agent.ring.interruptions import pass_on

_MODULES = ("megatron.core.parallel_state", "megatron.core.mpu", "megatron.mpu")

_DENSE_GROUPS = (
    ("get_tensor_model_parallel_group",),
    ("get_data_parallel_group_with_context_parallel", "get_data_parallel_group"),
)
_EXPERT_GROUPS = (
    ("get_expert_tensor_parallel_group",),
    ("get_expert_data_parallel_group", "get_data_modulo_expert_parallel_group"),
)
"""Names of the functions that give the group of shards, and of copies, by age."""


def is_shared_copy(parameter: torch.Tensor) -> bool:
    """Return whether another stage counts this tensor."""
    return getattr(parameter, "shared", False) is True


def is_expert(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is left out of the data parallel reduction."""
    return getattr(parameter, "allreduce", True) is False


def is_tensor_parallel(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is this rank's shard of a tensor."""
    return getattr(parameter, "tensor_model_parallel", False) is True


def axes_of(parameter: torch.Tensor) -> Iterator[PlacementAxis]:
    """Yield the axes of a parameter by its attributes and Megatron's groups; none without those."""
    shards, copies = (
        _ranks_of_first(names)
        for names in (_EXPERT_GROUPS if is_expert(parameter) else _DENSE_GROUPS)
    )
    if shards:
        dimension = getattr(parameter, "partition_dim", -1)
        if is_tensor_parallel(parameter):
            known = isinstance(dimension, int) and dimension >= 0
            yield PlacementAxis(Spread.SPLIT, shards, "tp", str(dimension) if known else "")
        else:
            yield PlacementAxis(Spread.COPIED, shards, "tp")
    if copies:
        yield PlacementAxis(Spread.COPIED, copies, "dp")


def _ranks_of_first(names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks of the first group that exists under one of these names."""
    for module in filter(None, map(sys.modules.get, _MODULES)):
        for name in names:
            try:
                group = getattr(module, name)()
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
