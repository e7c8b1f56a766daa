"""Trains one recipe with the probe, and returns what the rank wrote."""

import pickle
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mp_agent
from benchmarks.early_warning.causes import Recipe
from benchmarks.early_warning.tasks import STEPS
from mp_agent.records.flight import RankLog, Segment
from mp_agent.records.steps import EndReason
from mp_agent.ring.reader import RingReader
from mp_agent.settings import Settings

LAYER_INTERVAL = 10
_NOT_MEASURED = ("measure_fp8", "measure_local_gradients", "measure_step_parts")
"""What says nothing of one rank's numbers in 16 or 32 bits."""
MEASURED: dict[str, Any] = {
    name: name not in _NOT_MEASURED for name in Settings.model_fields if name.startswith("measure_")
}
"""All groups of statistics that are measured on request, but those."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A loss of each step [STEPS], NaN once lost, and what the probe wrote."""

    losses: Sequence[float]
    """What training is to lower."""
    seen: Sequence[float]
    """What the probe is given, or sees, as the loss."""
    rank: RankLog
    parameters: int


def train_once(recipe: Recipe, seed: int, kept: Path) -> Trained:
    """Return a training that is kept as a file of a directory, training it if it is not yet.

    The files are pickles: only such as one wrote oneself may be read.
    """
    path = kept / f"{recipe.name}-{seed}.pickle"
    if path.exists():
        with path.open("rb") as file:
            found: Trained = pickle.load(file)
        return found
    trained = train(recipe, seed)
    whole = path.with_suffix(".part")
    whole.write_bytes(pickle.dumps(trained))
    whole.rename(path)
    return trained


def train(recipe: Recipe, seed: int, steps: int = STEPS) -> Trained:
    """Train a model of the shape that belongs to the seed, with the probe."""
    training = _Training(recipe, seed)
    both = []
    with _watched(training.task.model, f"{recipe.name}-{seed}") as written:
        for step in range(steps):
            both.append(training.step(step))
            written.collect()
        mp_agent.shutdown()  # which writes the last step
        written.collect()
        size = sum(parameter.numel() for parameter in training.task.model.parameters())
        losses, seen = zip(*both, strict=True)
        return Trained(losses, seen, written.log(), size)


def losses_of(recipe: Recipe, seed: int, steps: int = STEPS) -> Sequence[float]:
    """Return the losses of the same training without the probe."""
    training = _Training(recipe, seed)
    return [training.step(step)[0] for step in range(steps)]


class _Training:
    def __init__(self, recipe: Recipe, seed: int) -> None:
        torch.set_num_threads(1)  # so that results do not depend on the machine
        torch.manual_seed(seed)
        self._recipe, self.task = recipe, recipe.task(seed)
        self._optimizer = torch.optim.AdamW(
            self.task.model.parameters(),
            lr=recipe.rate(0),
            betas=(0.9, recipe.beta2),
            eps=recipe.epsilon,
            weight_decay=0.0,
        )
        self._scaler = torch.amp.GradScaler("cpu", enabled=recipe.scaled)

    def step(self, step: int) -> tuple[float, float]:
        """Train a step; return the loss that is to fall, and the one that the probe sees."""
        recipe, scaler = self._recipe, self._scaler
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        losses = self.task.losses(step)
        if losses.observed is not None:
            mp_agent.observe(loss=losses.observed)
        torch.autograd.backward(scaler.scale(losses.trained * recipe.loss_weight(step)))
        scaler.unscale_(self._optimizer)
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.task.model.parameters(), recipe.clip_norm)
        scaler.step(self._optimizer)
        scaler.update()
        self._optimizer.zero_grad()
        seen = losses.trained if losses.observed is None else losses.observed
        return losses.course.item(), seen.item()


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
