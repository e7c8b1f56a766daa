"""Trains on four ranks that reduce their statistics; saves what each rank knows."""

import os
import pickle
from datetime import timedelta
from pathlib import Path

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

from mp_agent.probe.probe import Probe
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.fully_shard import runs
from tests.agent.probe.rings import make_identity
from tests.agent.probe.small_model import make_loss, make_model
from tests.gloo import end_process_group

STEPS, POISONED = 8, 4
STRATEGIES = ("ddp", "fsdp2", "hsdp", "tp", "replicas", "apart")


def run(rank: int, world_size: int, directory: Path) -> None:
    """Train by each strategy, all but the last in one job."""
    torch.set_num_threads(1)
    _begin(rank, world_size, directory)
    for strategy in filter(runs, STRATEGIES):
        found = _train(rank, world_size, strategy, directory)
        path_of(directory, strategy, rank).write_bytes(pickle.dumps(found))
    dist.barrier()
    end_process_group()


def run_until_death(rank: int, world_size: int, directory: Path) -> None:
    """Train until the last rank dies; every other one notes what its own training raises."""
    torch.set_num_threads(1)
    _begin(rank, world_size, directory)
    writer, probe = _watched(rank, world_size, "dying", directory)
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
    probe.detach()
    writer.close()
    os._exit(0)  # the group cannot be destroyed in order any more


def path_of(directory: Path, strategy: str, rank: int) -> Path:
    """Where a rank saves what it knows."""
    return directory / f"{strategy}{rank}.found"


def _begin(rank: int, world_size: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )


def _watched(
    rank: int, world_size: int, strategy: str, directory: Path
) -> tuple[RingWriter, Probe]:
    path = directory / f"{strategy}{rank}.ring"
    writer = RingWriter.create(path, make_identity(rank, world_size))
    probe = Probe(lambda: writer, Settings(reduction="process_group", reduction_interval=1))
    probe.attach()
    return writer, probe


def _train(
    rank: int, world_size: int, strategy: str, directory: Path
) -> dict[int, GlobalStatistics]:
    writer, probe = _watched(rank, world_size, strategy, directory)
    model = _wrapped(strategy, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: dict[int, GlobalStatistics] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        own_data = strategy not in ("tp", "replicas")
        loss = make_loss(model, step + 100 * rank if own_data else step)
        loss.backward()
        if step == POISONED and rank == 1:
            parameter = next(iter(model.parameters()))
            assert parameter.grad is not None
            local = parameter.grad
            local = getattr(local, "_local_tensor", local)
            local.view(-1)[:1] = torch.nan
        optimizer.step()
        if (latest := probe.global_statistics) is not None:
            found[latest.sequence] = latest
    assert probe._reduction is not None
    probe._reduction._take_up()
    if (latest := probe.global_statistics) is not None:
        found[latest.sequence] = latest
    probe.flush()
    probe.detach()
    writer.close()
    return found


def _wrapped(strategy: str, world_size: int) -> nn.Module:
    model = make_model(dist.get_rank() if strategy == "apart" else 0)
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy == "fsdp2":
        fully_shard(model)
    if strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    if strategy == "tp":
        mesh = init_device_mesh("cpu", (world_size,))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model
