"""Trains on four ranks that reduce their statistics; saves what each rank knows."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from mp_agent.records.global_statistics import GlobalStatistics
from tests.agent.probe.fully_shard import runs, wrapped
from tests.agent.probe.small_model import gradient_of, make_loss, make_model
from tests.agent.probe.watching import watched
from tests.gloo import process_group

STEPS, POISONED = 8, 4
REDUCTION: dict[str, Any] = {
    "reduction": "process_group",
    "reduction_interval": 1,
    "layer_interval": 10,
}
STRATEGIES = ("ddp", "fsdp2", "hsdp", "tp", "replicas", "apart")


def run(rank: int, world_size: int, directory: Path) -> None:
    """Train by each strategy, all but the last in one job."""
    with process_group(directory, rank, world_size, timeout_seconds=60):
        for strategy in filter(runs, STRATEGIES):
            found = _train(rank, world_size, strategy, directory)
            path_of(directory, strategy, rank).write_bytes(pickle.dumps(found))


def run_until_death(rank: int, world_size: int, directory: Path) -> None:
    """Train until the last rank dies; every other one notes what its own training raises."""
    with process_group(directory, rank, world_size, timeout_seconds=60):
        with watched(directory, rank, world_size, name="dying", **REDUCTION):
            model = DistributedDataParallel(make_model())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            ended = 0
            try:
                for step in range(STEPS):
                    if rank == world_size - 1 and step == POISONED:
                        os._exit(0)
                    make_loss(model, step).backward()
                    optimizer.step()
                    ended += 1
            except RuntimeError as error:
                path_of(directory, "dying", rank).write_text(f"{ended} {type(error).__name__}")
        os._exit(0)  # the group cannot be destroyed in order any more


def path_of(directory: Path, strategy: str, rank: int) -> Path:
    """Where a rank saves what it knows."""
    return directory / f"{strategy}{rank}.found"


def _train(
    rank: int, world_size: int, strategy: str, directory: Path
) -> dict[int, GlobalStatistics]:
    found: dict[int, GlobalStatistics] = {}
    with watched(directory, rank, world_size, name=strategy, **REDUCTION) as probe:
        model = _wrapped(strategy, world_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            own_data = strategy not in ("tp", "replicas")
            make_loss(model, step + 100 * rank if own_data else step).backward()
            if step == POISONED and rank == 1:
                local = gradient_of(next(iter(model.parameters())))
                getattr(local, "_local_tensor", local).view(-1)[:1] = torch.nan
            optimizer.step()
            if (latest := probe.global_statistics) is not None:
                found[latest.sequence] = latest
        assert probe._reduction is not None
        probe._reduction._take_up()
        if (latest := probe.global_statistics) is not None:
            found[latest.sequence] = latest
    return found


def _wrapped(strategy: str, world_size: int) -> nn.Module:
    model = make_model(dist.get_rank() if strategy == "apart" else 0)
    if strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        return model
    if strategy == "tp":
        mesh = init_device_mesh("cpu", (world_size,))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return wrapped(model, strategy)
