"""Trains on two ranks by DDP whose guard or reduction are not alike; saves how the ranks end."""

import json
import logging
import os
import signal
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mp_agent.ring.reader import RingReader
from tests.agent.probe.small_model import make_loss, make_model
from tests.agent.probe.watching import watched
from tests.gloo import end_process_group

STEPS, TROUBLED = 32, 26
TIMEOUT_SECONDS = 8
"""Of the job's own group, of which a wait of ours is a part."""
_STOPPED_SECONDS = 4.0

Ranks = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What each rank is set to; None for a rank that does not call `init()`."""

    ranks: Ranks
    spiking: bool = False
    poisoned: bool = False
    begins_late: bool = False
    """Rank 1 attaches after some steps."""
    leaves: bool = False
    """Rank 1 detaches before the others do."""
    pauses: bool = False
    """Rank 1 stops for longer than a wait, just before the troubled update."""
    groups_are_made_again: bool = False


@dataclass(kw_only=True)
class Ended:
    """What is left of a rank."""

    weights: list[float]
    lines: list[str]
    unsupported: list[str] = field(default_factory=list)
    reduced_sequence: int = 0
    """The last step that the ranks reduced; 0 without any."""


def run(rank: int, directory: Path, case: Case) -> None:
    """Train, and save what is left."""
    torch.set_num_threads(1)
    lines = _logged()
    _begin(rank, directory / "store")
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = case.ranks[rank]
    watching = ExitStack()
    probe = None
    for step in range(STEPS):
        is_first = step == (6 if case.begins_late and rank == 1 else 0)
        if settings is not None and is_first:
            probe = watching.enter_context(watched(directory, rank, 2, **settings))
        if case.groups_are_made_again and step == TROUBLED // 2:
            del wrapped
            dist.barrier()
            world = weakref.ref(dist.group.WORLD)
            end_process_group(lambda: dist.destroy_process_group(dist.group.WORLD))
            assert world() is None, "a group that is destroyed is held"
            _begin(rank, directory / "other store")
            wrapped = DistributedDataParallel(model)
        if case.leaves and rank == 1 and step == TROUBLED - 2:
            watching.close()
        optimizer.zero_grad()
        make_loss(wrapped, step + 100 * rank).backward()
        if step == TROUBLED:
            _spoil(model, case)
            if case.pauses and rank == 1:
                _pause()
        optimizer.step()
    reduced = None if probe is None else probe.global_statistics
    watching.close()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    ended = Ended(weights=[float(value) for value in weights], lines=lines)
    ended.reduced_sequence = 0 if reduced is None else reduced.sequence
    if settings is not None:
        reader = RingReader.open(directory / f"rank{rank}.ring")
        ended.unsupported = list(reader.state.unsupported)
        reader.close()
    (directory / f"{rank}.json").write_text(json.dumps(vars(ended)))
    del wrapped
    dist.barrier()
    end_process_group()


def ended(directory: Path, rank: int) -> Ended:
    """What a rank has saved."""
    return Ended(**json.loads((directory / f"{rank}.json").read_text()))


def _begin(rank: int, store: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )


def _spoil(model: torch.nn.Module, case: Case) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        if case.spiking:
            parameter.grad.mul_(1e3)
        if case.poisoned:
            parameter.grad.view(-1)[0] = torch.inf


def _pause() -> None:
    """Stop this process, until a child of it has it go on."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(_STOPPED_SECONDS)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


def _logged() -> list[str]:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("mp_agent").addHandler(Handler(logging.WARNING))
    return lines
