"""Trains one recipe with the probe, and returns what the rank wrote."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mp_agent
from benchmarks.early_warning.causes import STEPS, Recipe
from benchmarks.early_warning.data import Language
from benchmarks.early_warning.model import SHAPES, Shape, Transformer
from mp_agent.records.flight import RankLog, Segment
from mp_agent.records.steps import EndReason
from mp_agent.ring.reader import RingReader
from mp_agent.settings import Settings

LAYER_INTERVAL = 10
MEASURED: dict[str, Any] = {
    name: True for name in Settings.model_fields if name.startswith("measure_")
}
"""All groups of statistics that are measured on request."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The loss [STEPS] without z-loss, NaN once lost, and what the probe wrote."""

    losses: Sequence[float]
    rank: RankLog


def train(recipe: Recipe, seed: int, name: str, steps: int = STEPS) -> Trained:
    """Train a model of the shape that belongs to the seed."""
    torch.manual_seed(seed)
    model = Transformer(shape_of(seed), recipe.variant)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.rate(0), betas=(0.9, recipe.beta2), weight_decay=0.0
    )
    scaler = torch.amp.GradScaler("cpu", enabled=recipe.scaled)
    language = Language(seed)
    losses = []
    with _watched(model, name) as written:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            model.last_stream.gradient_factor = recipe.gradient_factor(step)
            losses.append(_step(model, optimizer, scaler, language.batch(), recipe, step))
            written.collect()
        mp_agent.shutdown()  # which writes the last step
        written.collect()
        return Trained(losses, written.log())


def shape_of(seed: int) -> Shape:
    """Return the shape of the model that is trained from a seed."""
    return SHAPES[seed % len(SHAPES)]


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    tokens: torch.Tensor,
    recipe: Recipe,
    step: int,
) -> float:
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    normalizer = logits.float().logsumexp(dim=-1)
    mp_agent.observe(loss=loss.detach())
    whole = loss + recipe.z_loss * normalizer.square().mean()
    torch.autograd.backward(scaler.scale(whole * recipe.loss_weight(step)))
    scaler.unscale_(optimizer)
    if recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.item()


class _Written:
    """Reads a ring while it is written, since it keeps the last steps and layer tables only."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._reader: RingReader | None = None
        self._segments: list[Segment] = []
        self._step = self._table = 0

    def collect(self) -> None:
        """Read what is new; the ring is there from the first backward on."""
        if self._reader is None:
            (path,) = self._directory.rglob("*.ring")
            self._reader = RingReader.open(path)
        schema = self._reader.schema
        steps, lost = self._reader.steps_after(self._step)
        tables = self._reader.layers_after(self._table)
        if lost:
            raise RuntimeError(f"{self._reader.path}: {lost} steps were overwritten")
        if schema is None or not (steps or tables):
            return
        self._step = max([self._step, *(step.sequence for step in steps)])
        self._table = max([self._table, *(table.sequence for table in tables)])
        self._segments.append(Segment(schema=schema, steps=tuple(steps), tables=tuple(tables)))

    def log(self) -> RankLog:
        """Return all that was read, and close the ring."""
        assert self._reader is not None
        with closing(self._reader) as reader:
            return RankLog(
                identity=reader.identity,
                state=reader.state,
                end=EndReason.COMPLETED,
                segments=tuple(self._segments),
            )


@contextmanager
def _watched(model: nn.Module, name: str) -> Iterator[_Written]:
    """Attach the probe to a model, and yield what reads its ring."""
    with tempfile.TemporaryDirectory() as directory:
        mp_agent.init(
            model,
            node_agent="none",
            run=name,
            dir=directory,
            layer_interval=LAYER_INTERVAL,
            overhead_budget=1e6,
            **MEASURED,
        )
        try:
            yield _Written(Path(directory))
        finally:
            mp_agent.shutdown()
