"""Tensors that are split: by DTensor, and by hand as Megatron does it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import mp_agent
from tests.numerics.models import ManualBlock, Model, seeded
from tests.numerics.registry import variant
from tests.numerics.training import (
    STEPS,
    WORLD,
    Reference,
    optimizer_of,
    reference_of,
    row_of,
    train,
    watched,
)


def _tensor_parallel(model: Model, mesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@variant("tp")
def tensor_parallel(place: Path, rank: int) -> Reference:
    reference = reference_of(seeded(Model), shares=[0])
    with watched(place, rank):
        model = seeded(Model)
        _tensor_parallel(model, init_device_mesh("cpu", (WORLD,)))
        train(model, optimizer_of(model.parameters()), 0)
    return reference


@variant("tp", "gradients with a partial placement")
def partial_gradients(place: Path, rank: int) -> Reference:
    """A replicated scale whose gradient nobody has summed up yet, beside a sharded one."""
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(1)
    start = torch.randn(8, dtype=torch.float64), torch.ones(8, 2, dtype=torch.float64)
    inputs = torch.randn(8, 2, dtype=torch.float64)
    reference: Reference = []
    with watched(place, rank):
        model = nn.Module()
        model.scale = nn.Parameter(distribute_tensor(start[0][:2], mesh, [Replicate()]))
        model.shift = nn.Parameter(distribute_tensor(start[1], mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
        for _ in range(STEPS):
            optimizer.zero_grad()
            values = distribute_tensor(inputs, mesh, [Shard(0)])
            output = values * model.scale + model.shift
            (output * output).sum().redistribute(placements=[Replicate()]).backward()
            assert model.scale.grad.placements[0].is_partial()
            reference.append({"": {"shift": row_of(model.shift.grad)}})
            optimizer.step()
    return reference


@variant("fsdp2+tp")
def fsdp2_tensor_parallel(place: Path, rank: int) -> Reference:
    reference = reference_of(seeded(Model), shares=range(2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with watched(place, rank):
        model = seeded(Model)
        _tensor_parallel(model, mesh["tensor"])
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        train(model, optimizer_of(model.parameters()), rank // 2)
    return reference


def _by_hand(
    place: Path, rank: int, describe: Callable[[Model, dist.ProcessGroup, dist.ProcessGroup], None]
) -> Reference:
    """Tensor parallelism over ranks (0, 1) and (2, 3), data parallelism over (0, 2) and (1, 3)."""
    reference = reference_of(seeded(Model), shares=range(2))
    tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    with watched(place, rank):
        model = seeded(Model)
        model.blocks = nn.ModuleList(ManualBlock(block, tensor) for block in model.blocks)
        describe(model, tensor, data)

        def reduce(step: int) -> None:
            for parameter in model.parameters():
                if parameter is getattr(model, "copy", None):
                    parameter.grad = torch.ones_like(parameter)
                    continue
                dist.all_reduce(parameter.grad, group=data)
                parameter.grad /= 2

        train(model, optimizer_of(model.parameters()), rank // 2, before_step=reduce)
    return reference


@variant("dp+tp")
def megatron(place: Path, rank: int) -> Reference:
    """Attributes on the parameters, and the groups that Megatron would have made."""

    def describe(model: Model, tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        for block in model.blocks:
            for parameter in block.split:
                parameter.tensor_model_parallel = True
                parameter.partition_dim = 1 if parameter is block.down.weight else 0
            block.norm.weight.sequence_parallel = True
        model.copy = nn.Parameter(torch.ones(5, dtype=torch.float64))
        model.copy.shared = True
        sys.modules["megatron.core.parallel_state"] = SimpleNamespace(
            get_tensor_model_parallel_group=lambda: tensor,
            get_data_parallel_group=lambda: data,
        )

    try:
        return _by_hand(place, rank, describe)
    finally:
        sys.modules.pop("megatron.core.parallel_state", None)


@variant("declared")
def declared(place: Path, rank: int) -> Reference:
    def describe(model: Model, tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        mp_agent.declare(model, replicate=range(WORLD))
        for block in model.blocks:
            for parameter in block.split:
                mp_agent.declare(parameter, shard=tensor, replicate=data)

    return _by_hand(place, rank, describe)
