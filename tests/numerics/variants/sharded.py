"""Parameters that are sharded: FSDP2, and what FSDP1 makes of them on a GPU."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.agent.probe.reference import row_of
from tests.numerics.flat import Unit
from tests.numerics.models import Model, TiedModel, batch, seeded
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


def _fsdp(place: Path, rank: int, mesh: DeviceMesh, **options: Any) -> Reference:
    reference = reference_of(seeded(Model))
    with watched(place, rank):
        model = seeded(Model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        train(model, optimizer_of(model.parameters()), rank)
    return reference


@variant("fsdp2")
def fsdp2(place: Path, rank: int) -> Reference:
    return _fsdp(place, rank, init_device_mesh("cpu", (WORLD,)), reshard_after_forward=True)


@variant("fsdp2")
def fsdp2_without_resharding(place: Path, rank: int) -> Reference:
    return _fsdp(place, rank, init_device_mesh("cpu", (WORLD,)), reshard_after_forward=False)


@variant("fsdp2")
def fsdp2_offloaded(place: Path, rank: int) -> Reference:
    mesh = init_device_mesh("cpu", (WORLD,))
    return _fsdp(place, rank, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


@variant("hsdp")
def hsdp(place: Path, rank: int) -> Reference:
    names = ("replicate", "shard")
    return _fsdp(place, rank, init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


@variant("fsdp2")
def fsdp2_accumulation_tied(place: Path, rank: int) -> Reference:
    reference = reference_of(seeded(TiedModel), micro_batches=2)
    with watched(place, rank):
        model = seeded(TiedModel)
        sharded = fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        optimizer = optimizer_of(model.parameters())
        for step in range(1, STEPS + 1):
            for micro_batch in range(2):
                sharded.set_requires_gradient_sync(micro_batch == 1)
                (loss_of(model(batch(step, [rank], micro_batch))) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return reference


@variant("fsdp2")
def fsdp2_mixed_precision(place: Path, rank: int) -> Reference:
    """Computes in bfloat16: the reference is an independent look at the gathered gradients."""
    reference: Reference = []
    with watched(place, rank):
        model = seeded(Model).float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (WORLD,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

        def look(step: int) -> None:
            reference.append({"": rows_of(dict(model.named_parameters()))})

        train(model, optimizer_of(model.parameters()), rank, before_step=look)
    return reference


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _flat(place: Path, rank: int, *, original: bool, hybrid: bool) -> Reference:
    """Gradients that come from nowhere, in the flat parameters of two units."""
    shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    copies = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    group, across = (shards, copies) if hybrid else (_everyone(), None)
    reference: Reference = []
    with watched(place, rank):
        model = seeded(Model)
        model.blocks[1] = inner = Unit(model.blocks[1], group, across, original=original)
        outer = Unit(model, group, across, original=original)
        optimizer = torch.optim.SGD(outer.parameters(), lr=1e-3)
        for step in range(1, STEPS + 1):
            rows = {}
            for prefix, unit in (("blocks.1.", inner), ("", outer)):
                torch.manual_seed(step)
                gradients = [torch.randn(shape, dtype=torch.float64) for shape in unit.shapes]
                gradients[0].view(-1)[0] = 0.0
                unit.set_gradients(gradients)
                for name, gradient in zip(unit.names, gradients, strict=True):
                    rows[prefix + name] = row_of(gradient)
            optimizer.step()
            reference.append({"": rows})
    return reference


@variant("fsdp1")
def fsdp1_flat(place: Path, rank: int) -> Reference:
    return _flat(place, rank, original=False, hybrid=False)


@variant("fsdp1")
def fsdp1_original_parameters(place: Path, rank: int) -> Reference:
    return _flat(place, rank, original=True, hybrid=False)


@variant("fsdp1")
def fsdp1_hybrid(place: Path, rank: int) -> Reference:
    return _flat(place, rank, original=False, hybrid=True)
