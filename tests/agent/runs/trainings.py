"""Small real trainings with the probe attached: good ones, and ones with a mistake."""

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe.probe import Probe
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.rings import make_identity
from tests.gloo import process_group

FEATURES, WIDTH, CLASSES, ROWS = 16, 32, 8, 128
STEPS = 256
MISTAKES = ("frozen-layer-too-few", "initialization", "dropout-doubled", "loss-divided-twice")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how."""

    seed: int = 0
    mistake: str = ""
    ranks: int = 1
    resumed: int = 0
    """The steps before, of which the ring has nothing."""
    steps: int = STEPS


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch: torch.Tensor = self.down(self.drop(functional.gelu(self.up(self.norm(x)))))
        return x + branch


class Network(nn.Module):
    """A frozen embedding, as of a model that is tuned, two blocks and a head."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        dropout = 0.4 if mistake == "dropout-doubled" else 0.2
        self.embed, self.drop = nn.Linear(FEATURES, WIDTH), nn.Dropout(dropout)
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.head = nn.Linear(WIDTH, CLASSES)
        if mistake == "initialization":
            nn.init.normal_(self.head.weight, std=1.0)
        if mistake != "frozen-layer-too-few":
            self.embed.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.drop(self.embed(x))))
        return logits


def train(training: Training, run_dir: Path) -> Path:
    """Train on as many ranks as asked for, and return the directory with their rings."""
    if training.ranks == 1:
        _rank(0, training, run_dir)
    else:
        run_dir.mkdir(parents=True)
        job = partial(_rank, training=training, run_dir=run_dir)
        spawn(job, nprocs=training.ranks)
    return run_dir


def _rank(rank: int, training: Training, run_dir: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    alone = nullcontext()
    with alone if training.ranks == 1 else process_group(run_dir, rank, training.ranks):
        _train(rank, training, run_dir)


def _train(rank: int, training: Training, run_dir: Path) -> None:
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99))
    torch.manual_seed(training.seed)
    network = Network(training.mistake)
    optimizer = torch.optim.AdamW(
        [one for one in network.parameters() if one.requires_grad], lr=4e-3
    )
    model = network if training.ranks == 1 else DistributedDataParallel(network)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    torch.manual_seed(1000 * training.seed + rank)
    probe: Probe | None = None
    writer: RingWriter | None = None
    for step in range(1, training.resumed + training.steps + 1):
        if step == training.resumed + 1:
            identity = replace(make_identity(rank, training.ranks), run=run_dir.name)
            path = run_dir / "0" / f"rank{rank}.ring"
            writer = RingWriter.create(path, identity, layer_capacity=64)
            probe = Probe(lambda made=writer: made, Settings())  # type: ignore[misc]
            probe.attach()
        inputs = torch.randn(ROWS, FEATURES)
        labels = (inputs @ teacher + torch.randn(ROWS, CLASSES)).argmax(dim=1)
        loss = functional.cross_entropy(model(inputs), labels)
        if training.mistake == "loss-divided-twice":
            loss = loss / 2
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert probe is not None and writer is not None
    probe.detach()
    writer.close()
