"""Trains on two ranks with a guard where they do not act alike of themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe.guard.update import GuardedOptimizer
from mp_agent.probe.probe import Probe
from tests.agent.probe.small_model import fail, make_loss, make_model, whole_weights
from tests.agent.probe.watching import watched
from tests.gloo import process_group

STEPS, TROUBLED = 16, 2


def run_uneven(rank: int, world_size: int, directory: Path) -> None:
    """Train where rank 1 runs out of inputs first, within DDP's context for that."""
    with _job(rank, world_size, directory):
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with model.join():
            for step in range(STEPS - 4 * rank):
                optimizer.zero_grad()
                make_loss(model, step + 100 * rank).backward()
                optimizer.step()
        _note(directory, rank, model)


def run_with_a_failure(rank: int, world_size: int, directory: Path) -> None:
    """Train where the guard fails on rank 1 alone, from step `TROUBLED` on."""
    with _job(rank, world_size, directory):
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            if rank == 1 and step == TROUBLED:
                GuardedOptimizer.carry_out = fail  # type: ignore[method-assign, assignment]
            optimizer.zero_grad()
            make_loss(model, step + 100 * rank).backward()
            optimizer.step()
        _note(directory, rank, model)


def run_with_a_checkpoint(rank: int, world_size: int, directory: Path) -> None:
    """Train where rank 0 alone has the state of its optimizer filled in, as for a checkpoint."""
    with _job(rank, world_size, directory):
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if rank == 0:
            get_optimizer_state_dict(model, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            make_loss(model, step + 100 * rank).backward()
            optimizer.step()
        _note(directory, rank, model)


def ended(directory: Path, rank: int) -> torch.Tensor:
    """The weights of a rank after all its steps, as one vector."""
    weights: torch.Tensor = torch.load(directory / f"{rank}.pt")
    return weights


def _note(directory: Path, rank: int, model: torch.nn.Module) -> None:
    torch.save(whole_weights(model), directory / f"{rank}.pt")


@contextmanager
def _job(rank: int, world_size: int, directory: Path) -> Iterator[Probe]:
    with (
        process_group(directory, rank, world_size, timeout_seconds=20),
        watched(directory, rank, world_size, guard=True) as probe,
    ):
        yield probe
