"""Training on one rank, step by step, of models that instruments look at."""

from collections.abc import Callable

import torch
from torch import nn

Between = Callable[[int], object]


def mean_of_squares(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def train(
    model: nn.Module,
    steps: int,
    inputs_of: Callable[[int], torch.Tensor],
    *,
    loss_of: Callable[[torch.Tensor], torch.Tensor] = mean_of_squares,
    lr: float = 0.0,
    passes: int = 1,
    between: Between = lambda step: None,
) -> list[torch.Tensor]:
    """Train with so many passes a step, and return the inputs of each pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    inputs = []
    for step in range(1, steps + 1):
        for _ in range(passes):
            inputs.append(inputs_of(step))
            loss_of(model(inputs[-1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)
    return inputs


def hooks_on(model: nn.Module, but: str = "order of modules") -> int:
    """Return how many forward hooks there are; but: the kind of those that are not counted."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return sum(getattr(hook, "_what", "") != but for hook in hooks)
