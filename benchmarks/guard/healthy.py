"""Healthy trainings with and without the guard, some of them with schedules."""

import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    StepLR,
)

import mp_agent
from benchmarks.machine import markdown
from mp_agent.ring.reader import RingReader

STEPS = 120
SEEDS = 2
VOCABULARY, LENGTH = 16, 12


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.layer(self.embedding(tokens)))
        return hidden


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layer = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.layer(self.embedding(tokens))[0])
        return hidden


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": _Transformer,
    "GRU": _Recurrent,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "AdamW, high rate": lambda p: torch.optim.AdamW(p, lr=3e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=3e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=3e-2),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
    "linear warm-up": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, step / 60)),
    "constant warm-up": lambda optimizer: ConstantLR(optimizer, factor=0.001, total_iters=40),
    "cosine with restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 30),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=3e-2, total_steps=STEPS),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 1e-5, 3e-2, 20, cycle_momentum=False),
    "steps": lambda optimizer: StepLR(optimizer, 30),
}


def healthy_table() -> str:
    """Train all of them, and return which are the same to the bit, and what the guard did."""
    rows = []
    trainings = [*product(MODELS, OPTIMIZERS, [""])]
    trainings += [("GRU", "AdamW", schedule) for schedule in SCHEDULES if schedule]
    for model, optimizer, schedule in trainings:
        same, actions = 0, 0
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as directory:
                plain, _ = _train(model, optimizer, schedule, seed, None)
                guarded, acted = _train(model, optimizer, schedule, seed, Path(directory))
            same += all(torch.equal(a, b) for a, b in zip(plain, guarded, strict=True))
            actions += acted
        named = f"{optimizer}, {schedule}" if schedule else optimizer
        rows.append((model, named, f"{same} of {SEEDS}", str(actions)))
    return markdown(("healthy model", "optimizer", "equal to the bit", "actions"), rows)


def _train(
    model_name: str, optimizer_name: str, schedule: str, seed: int, directory: Path | None
) -> tuple[list[torch.Tensor], int]:
    """Return the weights after the last step, and how many actions the guard took."""
    torch.manual_seed(seed)
    model = MODELS[model_name]()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = SCHEDULES[schedule](optimizer)
    if directory is not None:
        mp_agent.init(model, node_agent="none", guard=True, run="healthy", dir=directory)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        start = torch.randint(VOCABULARY, (8, 1), generator=generator)
        tokens = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        targets = tokens[:, 1:].flatten()
        loss: torch.Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    actions = 0
    if directory is not None:
        mp_agent.shutdown()
        actions = _actions(directory)
    return [each.detach() for each in model.parameters()], actions


def _actions(directory: Path) -> int:
    """Count them in the ring's records."""
    (path,) = directory.rglob("*.ring")
    reader = RingReader.open(path)
    try:
        schema, (records, _) = reader.schema, reader.steps_after(0)
    finally:
        reader.close()
    assert schema is not None
    assert len(records) == STEPS
    names = schema.step_columns
    return sum(
        value > 0.0
        for record in records
        for name, value in zip(names, record.values.tolist(), strict=True)
        if name.startswith("guard_")
    )
