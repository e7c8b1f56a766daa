"""Trains on two ranks with a GradScaler and a guard; the loss scale collapses."""

from pathlib import Path
from typing import Any

import torch

from tests.agent.probe.fully_shard import runs, wrapped
from tests.agent.probe.small_model import make_loss, make_model, whole_weights
from tests.agent.probe.watching import watched
from tests.gloo import process_group

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
    with process_group(directory, rank, world_size, timeout_seconds=60):
        for name, (strategy, is_apart, settings) in RUNS.items():
            if runs(strategy):
                with watched(directory / name, rank, world_size, **settings):
                    course = _train(rank, strategy, is_apart=is_apart)
                torch.save(course, directory / name / f"{rank}.pt")


def course_of(directory: Path, name: str, rank: int) -> tuple[list[float], torch.Tensor]:
    """The scale after each step, and the weights after the last one."""
    course: tuple[list[float], torch.Tensor] = torch.load(directory / name / f"{rank}.pt")
    return course


def _train(rank: int, strategy: str, *, is_apart: bool) -> tuple[list[float], torch.Tensor]:
    model = wrapped(make_model(), strategy)
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
    return scales, whole_weights(model)
