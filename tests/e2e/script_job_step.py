"""A step that clips gradients while they are still multiplied by the loss scale."""

from collections.abc import Callable

import torch
from torch import nn


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    """Return what makes a step from a loss."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step
