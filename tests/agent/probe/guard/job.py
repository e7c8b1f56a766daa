"""Trains on two ranks with a guard; on one step the gradients of one rank alone are bad."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe.probe import Probe
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.fully_shard import runs
from tests.agent.probe.rings import make_identity
from tests.agent.probe.small_model import make_loss, make_model
from tests.gloo import end_process_group

POISONED, SPIKING, STEPS = 24, 27, 30
STRATEGIES = ("ddp", "fsdp2", "replicas")


def run(rank: int, world_size: int, directory: Path) -> None:
    """Train by each strategy; save the weights after every step, whole, as this rank has them."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    for strategy in filter(runs, STRATEGIES):
        torch.save(_train(rank, world_size, strategy, directory), _path(directory, strategy, rank))
    dist.barrier()
    end_process_group()


def weights_of(directory: Path, strategy: str, rank: int) -> list[torch.Tensor]:
    """The weights after each step, as one vector."""
    loaded: list[torch.Tensor] = torch.load(_path(directory, strategy, rank))
    return loaded


def _path(directory: Path, strategy: str, rank: int) -> Path:
    return directory / f"{strategy}{rank}.pt"


def _train(rank: int, world_size: int, strategy: str, directory: Path) -> list[torch.Tensor]:
    path = directory / f"{strategy}{rank}.ring"
    writer = RingWriter.create(path, make_identity(rank, world_size))
    probe = Probe(lambda: writer, Settings(guard=True))
    model: nn.Module = make_model()
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    if strategy == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probe.attach()
    weights = []
    for step in range(STEPS):
        optimizer.zero_grad()
        make_loss(model, step if strategy == "replicas" else step + 100 * rank).backward()
        if rank == 1:
            _spoil(model, step)
        optimizer.step()
        weights.append(_whole(model))
    probe.flush()
    probe.detach()
    writer.close()
    return weights


def _spoil(model: nn.Module, step: int) -> None:
    """Change the gradients of this rank, after they were reduced, as a broken GPU does."""
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if step == POISONED:
            local.view(-1)[0] = torch.inf
        if step == SPIKING:
            local.mul_(1e5)


def _whole(model: nn.Module) -> torch.Tensor:
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([each.detach().reshape(-1).clone() for each in found])
