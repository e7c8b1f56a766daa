"""Trainings that fail without the guard, and what is planted in each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

STEPS = 100
PLANTED_STEP = 30
SURGE_STEPS = range(PLANTED_STEP, PLANTED_STEP + 20)
RATE_STEPS = range(PLANTED_STEP, PLANTED_STEP + 6)
FEATURES = 8


class Wide(nn.Module):
    """Leaves the range of FP16 from `begins` on: it multiplies before it divides."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.step = 0
        self._begins = begins

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [N, 32]."""
        factor = 2e5 if self.step >= self._begins else 1.0
        hidden: torch.Tensor = nn.functional.linear(
            inputs, self.first.weight * factor, self.first.bias * factor
        )
        return hidden / factor


def make_model(begins: int) -> nn.Sequential:
    """Return a small regression model."""
    return nn.Sequential(Wide(begins), nn.Tanh(), nn.Linear(32, 1))


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planted, and the policies that are to rescue the training.

    change_batch, change_gradients: called before and after the backward of each step.
    """

    name: str
    title: str
    guard: Any
    optimizer: Callable[[Any], torch.optim.Optimizer]
    scaled: bool = False
    """Trained in FP16 autocast with a GradScaler."""
    loss_factor: float = 1.0
    surge: float = 1.0
    """What the loss of `SURGE_STEPS` steps is multiplied by besides."""
    rate_surge: float = 1.0
    """What the learning rate of `RATE_STEPS` is multiplied by."""
    overflows_from: int = 10**9
    change_batch: Callable[[int, torch.Tensor, torch.Tensor], None] = field(
        default=lambda step, inputs, targets: None
    )
    change_gradients: Callable[[int, int, nn.Module], None] = field(
        default=lambda step, rank, model: None
    )

    @property
    def policies(self) -> str:
        """The names of the policies."""
        return ", ".join(self.guard)

    def set_rates(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rates of a step, as a schedule by hand does."""
        factor = self.rate_surge if step in RATE_STEPS else 1.0
        for group in optimizer.param_groups:
            group["lr"] = factor * optimizer.defaults["lr"]

    def factor_of(self, step: int) -> float:
        """Return what the loss of a step is multiplied by."""
        return self.loss_factor * (self.surge if step in SURGE_STEPS else 1.0)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _sgd_without_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)  # with it, the large gradients would act on later


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-16)


def _explode(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    if PLANTED_STEP <= step < PLANTED_STEP + 5:
        targets.mul_(1e6)


def _one_bad_batch(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    if step == PLANTED_STEP:
        inputs[0] = torch.nan


def _overflows(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    if PLANTED_STEP <= step < PLANTED_STEP + 30:
        targets[0] = torch.inf


def _nan_on_one_rank(step: int, rank: int, model: nn.Module) -> None:
    if step != PLANTED_STEP or rank != 0:
        return
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.reshape(-1)[:1] = torch.nan


CASES = (
    Case(
        name="explosion",
        title="gradients explode for five steps",
        guard=("skip_nonfinite", "clip_spikes"),
        optimizer=_sgd,
        change_batch=_explode,
    ),
    Case(
        name="explosion_skipped",
        title="gradients explode for five steps",
        guard=("skip_spikes",),
        optimizer=_sgd,
        change_batch=_explode,
    ),
    Case(
        name="bad_batch",
        title="one batch holds NaN",
        guard=("skip_nonfinite", "clip_spikes"),
        optimizer=_sgd,
        change_batch=_one_bad_batch,
    ),
    Case(
        name="nan_on_one_rank",
        title="the gradients of one rank become NaN after they were reduced",
        guard=("skip_nonfinite", "clip_spikes"),
        optimizer=_sgd,
        change_gradients=_nan_on_one_rank,
    ),
    Case(
        name="rate_jump",
        title="the learning rate of six steps is 400 times too large",
        guard=("skip_nonfinite", "clip_spikes", "hold_learning_rate"),
        optimizer=_adam,
        rate_surge=400.0,
    ),
    Case(
        name="scale_collapse",
        title="thirty overflows in a row lower the loss scale to where gradients underflow",
        guard={"raise_loss_scale": {"floor": 4096.0, "actions_max": 50}},
        optimizer=_adam,
        scaled=True,
        loss_factor=1e-6,
        change_batch=_overflows,
    ),
    Case(
        name="scale_reset",
        title="thirty overflows in a row lower the loss scale to where gradients underflow",
        guard={"reset_loss_scale": {"calm_steps": 10}},
        optimizer=_adam,
        scaled=True,
        loss_factor=1e-6,
        change_batch=_overflows,
    ),
    Case(
        name="loss_surge",
        title="the loss of twenty steps is a thousand times too large, in FP16",
        guard={"lower_learning_rate": {"rate_factor": 1e-3, "hold_steps": 15}},
        optimizer=_sgd_without_momentum,
        scaled=True,
        surge=1000.0,
    ),
    Case(
        name="fp16_module",
        title="a module begins to overflow in FP16",
        guard={"widen_precision": {"modules": "0", "troubles": 3, "hold_steps": 200}},
        optimizer=_adam,
        scaled=True,
        overflows_from=PLANTED_STEP,
    ),
)
