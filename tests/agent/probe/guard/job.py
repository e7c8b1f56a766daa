"""Trains on two ranks with a guard; on one step the gradients of one rank alone are bad."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.agent.probe.fully_shard import runs, wrapped
from tests.agent.probe.small_model import make_loss, make_model, whole_weights
from tests.agent.probe.watching import watched
from tests.gloo import process_group

POISONED, SPIKING, STEPS = 24, 27, 30
STRATEGIES = ("ddp", "fsdp2", "replicas")


def run(rank: int, world_size: int, directory: Path) -> None:
    """Train by each strategy; save the weights after every step, whole, as this rank has them."""
    with process_group(directory, rank, world_size, timeout_seconds=60):
        for strategy in filter(runs, STRATEGIES):
            weights = _train(rank, world_size, strategy, directory)
            torch.save(weights, _path(directory, strategy, rank))


def weights_of(directory: Path, strategy: str, rank: int) -> list[torch.Tensor]:
    """The weights after each step, as one vector."""
    loaded: list[torch.Tensor] = torch.load(_path(directory, strategy, rank))
    return loaded


def _path(directory: Path, strategy: str, rank: int) -> Path:
    return directory / f"{strategy}{rank}.pt"


def _train(rank: int, world_size: int, strategy: str, directory: Path) -> list[torch.Tensor]:
    model = wrapped(make_model(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = []
    with watched(directory, rank, world_size, name=strategy, guard=True):
        for step in range(STEPS):
            optimizer.zero_grad()
            make_loss(model, step if strategy == "replicas" else step + 100 * rank).backward()
            if rank == 1:
                _spoil(model, step)
            optimizer.step()
            weights.append(whole_weights(model))
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
