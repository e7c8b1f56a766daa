"""FSDP1 on GPUs, two ranks; what one process in float64 makes of the same data, for comparison."""

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from tests.agent.probe.watching import watched
from tests.numerics.models import Block, Model, batch, seeded
from tests.numerics.training import STEPS, Reference, loss_of, optimizer_of, reference_of, rows_of

WORLD = 2

VARIANTS = {
    "flat": (ShardingStrategy.FULL_SHARD, False),
    "original": (ShardingStrategy.FULL_SHARD, True),
    "grad_op": (ShardingStrategy.SHARD_GRAD_OP, True),
    "grad_op_flat": (ShardingStrategy.SHARD_GRAD_OP, False),
    "not_sharded": (ShardingStrategy.NO_SHARD, True),
}


def run(rank: int, directory: Path) -> None:
    """Train every variant in turn; called on each rank."""
    # NCCL does not share a GPU between ranks.
    several = torch.cuda.device_count() >= WORLD
    torch.cuda.set_device(rank if several else 0)
    method = f"file://{directory}/rendezvous"
    dist.init_process_group(
        "nccl" if several else "gloo", init_method=method, rank=rank, world_size=WORLD
    )
    for name, (strategy, original) in VARIANTS.items():
        _save(_train(directory / name, rank, strategy, original), directory / name, rank)
    for name, original in (("scaled", True), ("scaled_flat", False)):
        _save(_train_scaled(directory / name, rank, original), directory / name, rank)
    dist.barrier()
    dist.destroy_process_group()


def _save(reference: Reference, place: Path, rank: int) -> None:
    if rank == 0:
        torch.save(reference, place / "reference.pt")


def _wrapped(model: Model, original: bool, **options: Any) -> FullyShardedDataParallel:
    model = model.cuda()
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        model.blocks[index] = FullyShardedDataParallel(block, use_orig_params=original, **options)
    return FullyShardedDataParallel(model, use_orig_params=original, **options)


def _train(place: Path, rank: int, strategy: ShardingStrategy, original: bool) -> Reference:
    reference = reference_of(seeded(Model), shares=range(WORLD))
    with watched(place, rank, WORLD):
        model = _wrapped(seeded(Model), original, sharding_strategy=strategy)
        optimizer = optimizer_of(model.parameters())
        for step in range(1, STEPS + 1):
            loss_of(model(batch(step, [rank]).cuda())).backward()
            optimizer.step()
            optimizer.zero_grad()
    return reference


def _train_scaled(place: Path, rank: int, original: bool) -> Reference:
    """Mixed precision under ShardedGradScaler, which is imported once the probe is attached.

    The reference trains the same way with original parameters, whose gradients FSDP itself
    gathers.
    """
    precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    reference = _play(rank, True, precision, look=True)
    with watched(place, rank, WORLD):
        _play(rank, original, precision, look=False)
    return reference


def _play(rank: int, original: bool, precision: MixedPrecision, *, look: bool) -> Reference:
    module = importlib.import_module("torch.distributed.fsdp.sharded_grad_scaler")
    model = _wrapped(seeded(Model).float(), original, mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = module.ShardedGradScaler(init_scale=2.0**8, growth_interval=2)
    seen: Reference = []
    for step in range(1, STEPS + 1):
        scale = scaler.get_scale()
        scaler.scale(loss_of(model(batch(step, [rank]).cuda().float())).float()).backward()
        if look:
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                named = model.named_parameters()
                plain = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in named}
                seen.append({"": rows_of(plain, scale)})
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1e-2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen
