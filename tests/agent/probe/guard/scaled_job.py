"""Trains on two ranks with a GradScaler and a guard; the loss scale collapses."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.agent.probe.fully_shard import runs
from tests.agent.probe.small_model import make_loss, make_model
from tests.agent.probe.watching import watched
from tests.gloo import end_process_group

CALM, COLLAPSE, STEPS = 5, range(6, 18), 30
RESET = {"reset_loss_scale": {"calm_steps": CALM}}
RUNS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "ddp": ("ddp", False, {"guard": RESET}),
    "fsdp2": ("fsdp2", False, {"guard": RESET}),
    "dry_run": ("ddp", False, {"guard": RESET, "guard_dry_run": True}),
    "one_rank": ("ddp", True, {"guard": {"skip_nonfinite": {"actions_max": 20}, **RESET}}),
}
"""Strategy, whether one rank alone finds the overflows, and settings."""


def run(rank: int, world_size: int, directory: Path) -> None:
    """Make all runs; save the scales and the weights after every step, as this rank has them."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    for name, (strategy, is_apart, settings) in RUNS.items():
        if not runs(strategy):
            continue
        (directory / name).mkdir(exist_ok=True)
        with watched(directory / name, rank, world_size, **settings):
            course = _train(rank, strategy, is_apart=is_apart)
        torch.save(course, directory / name / f"{rank}.pt")
    dist.barrier()
    end_process_group()


def course_of(directory: Path, name: str, rank: int) -> tuple[list[float], torch.Tensor]:
    """The scale after each step, and the weights after the last one."""
    course: tuple[list[float], torch.Tensor] = torch.load(directory / name / f"{rank}.pt")
    return course


def _train(rank: int, strategy: str, *, is_apart: bool) -> tuple[list[float], torch.Tensor]:
    model: nn.Module = make_model()
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    if strategy == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        overflows = rank == 1 and step in COLLAPSE
        loss = make_loss(model, step + 100 * rank)
        scaler.scale(loss * (float("inf") if overflows and not is_apart else 1.0)).backward()
        if overflows and is_apart:
            next(model.parameters()).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return scales, torch.cat([each.detach().reshape(-1) for each in weights])
