"""Tensors that are split: by DTensor, and by hand as Megatron does it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import mp_agent
from tests.agent.probe.reference import row_of
from tests.numerics.models import HIDDEN, Block, ManualBlock, Model, batch, seeded
from tests.numerics.registry import variant
from tests.numerics.training import (
    STEPS,
    WORLD,
    Reference,
    loss_of,
    optimizer_of,
    reference_of,
    rows_of,
    train,
    watched,
)


def _tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
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
    """A replicated scale whose gradient is not summed up yet, next to a sharded one."""
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(1)
    start = torch.randn(8, dtype=torch.float64), torch.ones(8, 2, dtype=torch.float64)
    inputs = torch.randn(8, 2, dtype=torch.float64)
    reference: Reference = []
    with watched(place, rank):
        model = nn.Module()
        model.scale = scale = nn.Parameter(distribute_tensor(start[0][:2], mesh, [Replicate()]))
        model.shift = shift = nn.Parameter(distribute_tensor(start[1], mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
        for _ in range(STEPS):
            optimizer.zero_grad()
            values = distribute_tensor(inputs, mesh, [Shard(0)])
            output = values * scale + shift
            total = (output * output).sum()
            assert isinstance(total, DTensor)
            total.redistribute(placements=[Replicate()]).backward()
            scale_gradient, shift_gradient = scale.grad, shift.grad
            assert isinstance(scale_gradient, DTensor) and shift_gradient is not None
            assert scale_gradient.placements[0].is_partial()
            reference.append({"": {"shift": row_of(shift_gradient)}})
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
    place: Path,
    rank: int,
    describe: Callable[[Model, dist.ProcessGroup, dist.ProcessGroup], None],
    make_optimizer: Callable[[Model, dist.ProcessGroup], torch.optim.Optimizer] = (
        lambda model, data: optimizer_of(model.parameters())
    ),
) -> Reference:
    """Tensor parallelism over ranks (0, 1) and (2, 3), data parallelism over (0, 2) and (1, 3)."""
    reference = reference_of(seeded(Model), shares=range(2))
    tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    with watched(place, rank):
        model = seeded(Model)
        whole = [block for block in model.blocks if isinstance(block, Block)]
        model.blocks = nn.ModuleList(ManualBlock(block, tensor) for block in whole)
        describe(model, tensor, data)

        optimizer = make_optimizer(model, data)

        def reduce(step: int) -> None:
            for parameter in model.parameters():
                if parameter is getattr(model, "copy", None):
                    parameter.grad = torch.ones_like(parameter)
                    continue
                gradient = parameter.grad
                assert gradient is not None
                dist.all_reduce(gradient, group=data)
                gradient.div_(2)

            if isinstance(optimizer, _SlicedAdamW):
                optimizer.take_gradients()

        train(model, optimizer, rank // 2, before_step=reduce)
    return reference


def _split_blocks(model: Model) -> list[ManualBlock]:
    return [block for block in model.blocks if isinstance(block, ManualBlock)]


@variant("dp+tp")
def megatron(place: Path, rank: int) -> Reference:
    """Attributes on the parameters, and the groups that Megatron would have made."""

    def describe(model: Model, tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        marked: Any
        for block in _split_blocks(model):
            for marked in block.split:
                marked.tensor_model_parallel = True
                marked.partition_dim = 1 if marked is block.down.weight else 0
            marked = block.norm.weight
            marked.sequence_parallel = True
        model.copy = marked = nn.Parameter(torch.ones(5, dtype=torch.float64))
        marked.shared = True
        parallel_state: Any = SimpleNamespace(
            get_tensor_model_parallel_group=lambda: tensor,
            get_data_parallel_group=lambda: data,
        )
        sys.modules["megatron.core.parallel_state"] = parallel_state

    try:
        return _by_hand(place, rank, describe)
    finally:
        sys.modules.pop("megatron.core.parallel_state", None)


class _SlicedAdamW(torch.optim.AdamW):
    """Steps this rank's slice of each parameter, as Megatron's distributed optimizer makes it.

    Every second parameter has its own master, as one in 16 bits; of the others the slice is a
    view. One parameter is whole on the first rank of the group, and missing on the other.
    """

    def __init__(self, model: Model, data: dist.ProcessGroup) -> None:
        self._data, self._pieces = data, list[tuple[Any, torch.Tensor, slice]]()
        parameters: Any = [each for each in model.parameters() if not hasattr(each, "shared")]
        super().__init__(parameters, lr=1e-2)
        for index, parameter in enumerate(parameters):
            parameter.main_param_sharded = True
            whole = index == 2
            half = parameter.numel() if whole else parameter.numel() // 3
            part = slice(0, half) if dist.get_rank(data) == 0 else slice(half, None)
            piece = parameter.view(-1)[part]
            if index % 2:
                piece = parameter.main_param = piece.detach().clone()
            if piece.numel():
                self._pieces.append((parameter, piece, part))
        self._parameters = parameters
        self.param_groups[0]["params"] = [piece for _, piece, _ in self._pieces]
        self.register_step_post_hook(lambda *_: self._gather())

    @torch.no_grad()
    def _gather(self) -> None:
        held = {id(parameter): (piece, part) for parameter, piece, part in self._pieces}
        for parameter in self._parameters:
            gathered = torch.zeros(parameter.numel(), dtype=parameter.dtype)
            if id(parameter) in held:
                piece, part = held[id(parameter)]
                gathered[part] = piece
            dist.all_reduce(gathered, group=self._data)
            parameter.view(-1).copy_(gathered)
            parameter.grad = None

    def take_gradients(self) -> None:
        for parameter, piece, part in self._pieces:
            piece.grad = parameter.grad.view(-1)[part]


@variant("tp+zero1")
def distributed_optimizer(place: Path, rank: int) -> Reference:
    """Megatron's distributed optimizer, with the groups that Megatron would have made."""
    made: list[_SlicedAdamW] = []

    def describe(model: Model, tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        marked: Any
        for block in _split_blocks(model):
            for marked in block.split:
                marked.tensor_model_parallel = True
                marked.partition_dim = 1 if marked is block.down.weight else 0
        sys.modules["megatron.core.parallel_state"] = cast(
            Any,
            SimpleNamespace(
                get_tensor_model_parallel_group=lambda: tensor,
                get_data_parallel_group=lambda *, with_context_parallel=False: data,
            ),
        )

    def make_optimizer(model: Model, data: dist.ProcessGroup) -> torch.optim.Optimizer:
        made.append(_SlicedAdamW(model, data))
        return made[0]

    try:
        return _by_hand(place, rank, describe, make_optimizer)
    finally:
        sys.modules.pop("megatron.core.parallel_state", None)


@variant("declared")
def declared(place: Path, rank: int) -> Reference:
    def describe(model: Model, tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        mp_agent.declare(model, replicate=range(WORLD))
        for block in _split_blocks(model):
            for parameter in block.split:
                mp_agent.declare(parameter, shard=tensor, replicate=data)

    return _by_hand(place, rank, describe)


@variant("ddp")
def by_hand_under_data_parallelism(place: Path, rank: int) -> Reference:
    """DDP over ranks (0, 2) and (1, 3) says nothing of what both hold alike."""
    tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    reference = _reference_of_parts()
    with watched(place, rank):
        model = seeded(Model)
        whole = [block for block in model.blocks if isinstance(block, Block)]
        model.blocks = nn.ModuleList(ManualBlock(block, tensor) for block in whole)
        wrapped = DistributedDataParallel(model, process_group=data)
        train(wrapped, optimizer_of(wrapped.parameters()), rank // 2)
    return reference


def _reference_of_parts() -> Reference:
    """As `reference_of`, with the parts of tensors as layers of their own."""
    whole = seeded(Model)
    optimizer = optimizer_of(whole.parameters())
    reference: Reference = []
    for step in range(1, STEPS + 1):
        whole.zero_grad()
        loss_of(whole(batch(step, range(2)))).backward()
        rows = rows_of(dict(whole.named_parameters()))
        for name, parameter in whole.named_parameters():
            if name.endswith(("up.weight", "up.bias", "down.weight")):
                del rows[name]
                assert parameter.grad is not None
                parts = parameter.grad.split(HIDDEN // 2, dim=int("down" in name))
                homes = zip(("0,2", "1,3"), parts, strict=True)
                rows |= {f"{name}@{home}": row_of(part) for home, part in homes}
        reference.append({"": rows})
        optimizer.step()
    return reference
