"""Stages of a pipeline, with and without copies."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.numerics.models import Model, Stage, batch, seeded
from tests.numerics.naming import renamed, united
from tests.numerics.registry import variant
from tests.numerics.training import (
    STEPS,
    WORLD,
    Reference,
    loss_of,
    optimizer_of,
    reference_of,
    watched,
)


def _pipeline(stage: nn.Module, rank: int, step: int, share: int, stages: list[list[int]]) -> None:
    """Forward and backward of one micro-batch through the stages, `stages[s][share]` by rank."""
    number = next(index for index, ranks in enumerate(stages) if rank in ranks)
    inputs = batch(step, [share])
    if number > 0:
        inputs = _received(stages[number - 1][share]).requires_grad_()
    output = stage(inputs)
    if number + 1 < len(stages):
        _send(output.detach(), stages[number + 1][share])
        output.backward(_received(stages[number + 1][share]))
    else:
        loss_of(output).backward()
    if number > 0:
        assert inputs.grad is not None
        _send(inputs.grad, stages[number - 1][share])


def _send(values: torch.Tensor, rank: int) -> None:
    dist.send(torch.tensor(values.shape), rank)
    dist.send(values.contiguous(), rank)


def _received(rank: int) -> torch.Tensor:
    shape = torch.zeros(2, dtype=torch.int64)
    dist.recv(shape, rank)
    values = torch.zeros(tuple(shape.tolist()), dtype=torch.float64)
    dist.recv(values, rank)
    return values


@variant("ddp")
def pipeline_of_replicas(place: Path, rank: int) -> Reference:
    """Two stages with parameters of different names, each on two ranks under DDP."""
    reference = reference_of(seeded(Model), shares=range(2))
    stages = [[0, 1], [2, 3]]
    groups = [dist.new_group(ranks) for ranks in stages]
    number, share = divmod(rank, 2)
    with watched(place, rank):
        model = seeded(Model)
        if number == 0:
            model.blocks[1] = nn.Identity()
            model.add_module("head", nn.Identity())
        else:
            model.add_module("embed", nn.Identity())
            model.blocks[0] = nn.Identity()
        stage = DistributedDataParallel(model, process_group=groups[number])
        optimizer = optimizer_of(stage.parameters())
        for step in range(1, STEPS + 1):
            _pipeline(stage, rank, step, share, stages)
            optimizer.step()
            optimizer.zero_grad()
    return reference


@variant("ddp")
def pipeline_of_equal_names(place: Path, rank: int) -> Reference:
    """Stages whose parameters have the same names and shapes are told apart by their ranks."""
    reference = reference_of(_chain(2), shares=range(2))
    stages = [[0, 1], [2, 3]]
    groups = [dist.new_group(ranks) for ranks in stages]
    number, share = divmod(rank, 2)
    with watched(place, rank):
        stage = DistributedDataParallel(_chain(2)[number], process_group=groups[number])
        optimizer = optimizer_of(stage.parameters())
        for step in range(1, STEPS + 1):
            _pipeline(stage, rank, step, share, stages)
            optimizer.step()
            optimizer.zero_grad()
    homes = {"0": "0-1", "1": "2-3"}
    return renamed(reference, lambda name: f"{name[2:]}@{homes[name[0]]}")


@variant("none")
def pipeline_of_plain_stages(place: Path, rank: int) -> Reference:
    """Nothing says that the stages are different: their gradients do."""
    reference = reference_of(_chain(WORLD), shares=[0])
    with watched(place, rank):
        stage = _chain(WORLD)[rank]
        optimizer = optimizer_of(stage.parameters())
        for step in range(1, STEPS + 1):
            _pipeline(stage, rank, step, 0, [[0], [1], [2], [3]])
            optimizer.step()
            optimizer.zero_grad()
    return [{"": united(rows[""], list("0123"), "")} for rows in reference]


def _chain(stages: int) -> nn.Sequential:
    return nn.Sequential(*(seeded(Stage, seed=10 + number) for number in range(stages)))
