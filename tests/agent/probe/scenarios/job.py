"""A training job for `torch.multiprocessing.spawn`, and what an independent eye saw of it.

The reference reads the gradients itself, after the last backward of a step and before anything
else touches them, gathers them over the ranks, and computes in float64 with numpy.
"""

import contextlib
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

# Imported by name before the probe attaches, as training scripts do.
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from mp_agent.probe.probe import Probe
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.reference import row_of
from tests.agent.probe.rings import make_identity
from tests.agent.probe.scenarios.variants import POISONED_STEP, Variant, variants_of
from tests.gloo import process_group

LAYER_INTERVAL = 2
"""Steps 1, 2, 4, … look at layers and derive totals from them; the others measure totals."""


class _NanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, torch.nan)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 33), nn.ReLU(), nn.Linear(33, 7))
        self.head = nn.Linear(7, 3)  # fewer rows than 4 ranks: one shard is empty
        self.poison_backward = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs)
        if self.poison_backward:
            hidden = _NanInBackward.apply(hidden)
        outputs: torch.Tensor = self.head(hidden)
        return outputs


def run(rank: int, world_size: int, strategy: str, directory: Path) -> None:
    """Train every variant in turn; called on each rank."""
    torch.set_num_threads(1)
    alone = contextlib.nullcontext()
    with alone if world_size == 1 else process_group(directory, rank, world_size):
        for variant in variants_of(strategy):
            _train(rank, world_size, strategy, variant, directory / variant.name)


def _train(rank: int, world_size: int, strategy: str, variant: Variant, directory: Path) -> None:
    torch.manual_seed(1)
    model = _wrapped(Model(), strategy, world_size)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    kind = getattr(torch.optim, variant.optimizer)
    optimizer = kind(model.parameters(), lr=1e-2, fused=variant.fused)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=variant.scale or 1.0, growth_interval=3, enabled=variant.scale > 0
    )
    writer = RingWriter.create(directory / f"rank{rank}.ring", make_identity(rank, world_size))
    probe = Probe(lambda: writer, Settings(layer_interval=LAYER_INTERVAL, measure_step_parts=True))
    probe.attach()
    reference = _Reference(inner)
    for step in range(1, variant.steps + 1):
        poisoned = step == POISONED_STEP and rank == world_size - 1
        inner.poison_backward = poisoned and variant.poison == "backward_nan"
        scale = scaler.get_scale()
        losses = []
        for micro_batch in range(variant.micro_batches):
            inputs = torch.randn(6, 5, generator=_generator(rank, step, micro_batch))
            if poisoned and variant.poison.startswith("input"):
                inputs[0, 0] = float(variant.poison.removeprefix("input_"))
            with _sync(model, last=micro_batch == variant.micro_batches - 1):
                with torch.autocast(
                    "cpu",
                    dtype=getattr(torch, variant.autocast or "bfloat16"),
                    enabled=bool(variant.autocast),
                ):
                    loss = model(inputs).float().pow(2).mean() / variant.micro_batches
                losses.append(loss.item())
                scaler.scale(loss).backward()
        reference.look(scale, losses)
        if variant.explicit_unscale:
            scaler.unscale_(optimizer)
        if variant.clip_norm:
            clip_grad_norm_(model.parameters(), variant.clip_norm)
        if variant.clip_value:
            clip_grad_value_(model.parameters(), variant.clip_value)
        before = [parameter.detach().clone() for parameter in _local(model)]
        scaler.step(optimizer)
        reference.note_update(before, list(_local(model)))
        scaler.update()
        optimizer.zero_grad()
    probe.detach()
    writer.close()
    reference.save(directory / f"reference{rank}.npz")


def _wrapped(model: nn.Module, strategy: str, world_size: int) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(model.get_submodule("body"), mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _sync(model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def _generator(rank: int, step: int, micro_batch: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * rank + 10 * step + micro_batch)


def _local(model: nn.Module):
    for parameter in model.parameters():
        yield parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Reference:
    """Per step: rows [L, C] of the layers, whether the update was skipped, the rank's loss."""

    def __init__(self, model: nn.Module) -> None:
        self._names, self._parameters = zip(*model.named_parameters(), strict=True)
        self._rows: list[np.ndarray] = []
        self._skipped: list[bool] = []
        self._losses: list[float] = []
        self._scales: list[float] = []

    def look(self, scale: float, losses: list[float]) -> None:
        self._rows.append(np.stack([row_of(p.grad, scale) for p in self._parameters]))
        self._losses.append(float(np.sum(losses)))
        self._scales.append(scale)

    def note_update(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        unchanged = all(
            torch.equal(old, new) for old, new in zip(before, after, strict=True) if old.numel()
        )
        self._skipped.append(unchanged)

    def save(self, path: Path) -> None:
        np.savez(
            path,
            names=np.array(self._names),
            rows=np.stack(self._rows),
            skipped=np.array(self._skipped),
            losses=np.array(self._losses),
            scales=np.array(self._scales),
        )
