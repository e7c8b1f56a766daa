"""Trains a variant under a probe; and what a single process in float64 makes of the same data."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mp_agent.probe.probe import Probe
from tests.agent.probe import watching
from tests.agent.probe.reference import row_of
from tests.numerics.models import batch

STEPS = 4
WORLD = 4

Rows: TypeAlias = dict[str, np.ndarray]
Reference: TypeAlias = list[dict[str, Rows]]
"""Per step and optimizer, the gradient columns of each layer."""
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def watched(directory: Path, rank: int) -> AbstractContextManager[Probe]:
    """A probe on this rank; looks at layers on steps 1, 2 and 4."""
    return watching.watched(directory, rank, WORLD, measure_updates=True)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.double().pow(2).mean()


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    share: int,
    *,
    before_step: Callable[[int], None] = lambda step: None,
    step_optimizer: Callable[[], None] | None = None,
) -> None:
    """Train one share of the data."""
    for step in range(1, STEPS + 1):
        loss_of(model(batch(step, [share]))).backward()
        before_step(step)
        (step_optimizer or optimizer.step)()
        optimizer.zero_grad()


def reference_of(
    model: nn.Module,
    shares: Iterable[int] = range(WORLD),
    *,
    micro_batches: int = 1,
    clip_norm: float = float("inf"),
    make_optimizer: MakeOptimizer = optimizer_of,
    parameters_at: Callable[[int], Mapping[str, nn.Parameter]] | None = None,
) -> Reference:
    """What one process sees that trains all shares of the data at once."""
    chosen = parameters_at or (lambda step: dict(model.named_parameters()))
    optimizer = make_optimizer(chosen(1).values())
    seen: Reference = []
    for step in range(1, STEPS + 1):
        model.zero_grad()
        for micro_batch in range(micro_batches):
            inputs = batch(step, list(shares), micro_batch)
            (loss_of(model(inputs)) / micro_batches).backward()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if new := [p for p in chosen(step).values() if id(p) not in held]:
            optimizer.add_param_group({"params": new})
        seen.append({"": rows_of(chosen(step))})
        clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return seen


def updates_of(
    model: nn.Module,
    shares: Iterable[int] = range(WORLD),
    make_optimizer: MakeOptimizer = optimizer_of,
) -> list[dict[str, dict[str, float]]]:
    """Per step, what one process that trains all shares at once does to each layer's weights."""
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters.values())
    seen = []
    for step in range(1, STEPS + 1):
        model.zero_grad()
        loss_of(model(batch(step, list(shares)))).backward()
        before = {name: weight.detach().clone() for name, weight in parameters.items()}
        optimizer.step()
        rows = {}
        for name, weight in parameters.items():
            moment = optimizer.state[weight]["exp_avg_sq"].double() / (1 - 0.999**step)
            gradient = weight.grad
            assert gradient is not None
            ratio = gradient.double().square() / moment.clamp(min=1e-16)
            rows[name] = {
                "elements": float(weight.numel()),
                "weight_sum_squares": float(weight.detach().double().square().sum()),
                "update_sum_squares": float(
                    (weight.detach() - before[name]).double().square().sum()
                ),
                "squared_ratio_sum": float(ratio.sum()),
            }
        seen.append(rows)
    return seen


def rows_of(parameters: Mapping[str, torch.Tensor], scale: float = 1.0) -> Rows:
    """The gradient columns of each parameter that has a gradient; whole ones of DTensors."""
    return {
        name: row_of(parameter.grad, scale)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
