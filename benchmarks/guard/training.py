"""Trains one case, plain or on two ranks, with and without the guard."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import mp_agent
from benchmarks.guard.cases import FEATURES, STEPS, Case, Wide, make_model

BATCH = 32
MEASURED_STEPS = 2
STRATEGIES = {"plain": 1, "ddp": 2, "fsdp2": 2}
Wrap = Callable[[nn.Module], nn.Module]


def _fully_sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


_WRAPS: dict[str, Wrap] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp2": _fully_sharded,
}


def train(case: Case, strategy: str, seed: int, *, guarded: bool, directory: Path) -> list[float]:
    """Return the loss over held-out data every `MEASURED_STEPS` steps; NaN once lost."""
    torch.manual_seed(seed)
    inner = make_model(case.overflows_from)
    wide = inner[0]
    assert isinstance(wide, Wide)
    model = _WRAPS[strategy](inner)
    optimizer = case.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=case.scaled)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if guarded:
        run = f"{case.name}-{strategy}-{seed}"
        mp_agent.init(model, node_agent="none", guard=case.guard, run=run, dir=directory / "rings")
    losses = []
    for step in range(STEPS):
        wide.step = step
        inputs, targets = _data(seed, 1000 * rank + step, BATCH)
        case.change_batch(step, inputs, targets)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16) if case.scaled else nullcontext():
            outputs = model(inputs)
        loss = (outputs.float() - targets).pow(2).mean() * case.factor_of(step)
        scaler.scale(loss).backward()
        case.change_gradients(step, rank, model)
        case.set_rates(step, optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step % MEASURED_STEPS == MEASURED_STEPS - 1:
            losses.append(_held_out_loss(model, seed))
    if guarded:
        mp_agent.shutdown()
    return losses


def train_on_ranks(
    cases: list[Case], strategy: str, seeds: int, modes: tuple[bool, ...] = (False, True)
) -> dict[tuple[str, int, bool], list[float]]:
    """Return the courses of all cases and seeds; the ranks are processes that go through them."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        arguments = (directory, strategy, [case.name for case in cases], seeds, modes)
        start: Callable[..., Any] = start_processes
        start(_run_rank, args=arguments, nprocs=STRATEGIES[strategy], start_method="forkserver")
        courses: dict[tuple[str, int, bool], list[float]] = torch.load(directory / "courses.pt")
        return courses


def _run_rank(
    rank: int,
    directory: Path,
    strategy: str,
    names: list[str],
    seeds: int,
    modes: tuple[bool, ...],
) -> None:
    from benchmarks.guard.cases import CASES

    torch.set_num_threads(1)
    ranks = STRATEGIES[strategy]
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=300),
        )
    courses = {
        (case.name, seed, guarded): train(
            case, strategy, seed, guarded=guarded, directory=directory
        )
        for case in CASES
        if case.name in names
        for seed in range(seeds)
        for guarded in modes
    }
    if rank == 0:
        torch.save(courses, directory / "courses.pt")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _data(seed: int, number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [rows, FEATURES] and targets [rows, 1] of a fixed smooth function."""
    teacher = torch.randn(FEATURES, 1, generator=torch.Generator().manual_seed(seed))
    teacher /= FEATURES**0.5
    generator = torch.Generator().manual_seed(100_000 * (seed + 1) + number)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    return inputs, torch.sin(inputs @ teacher)


def _held_out_loss(model: nn.Module, seed: int) -> float:
    """Return it in FP32, where nothing overflows. Every rank takes part."""
    inputs, targets = _data(seed, 99_999, 128)
    with torch.no_grad():
        return float((model(inputs) - targets).pow(2).mean())
