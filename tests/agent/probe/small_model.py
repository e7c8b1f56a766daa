"""A model that trains in a moment, and what its gradients amount to."""

from typing import NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_loss(model: nn.Module, seed: int = 0) -> torch.Tensor:
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = model(inputs).pow(2).mean()
    return loss


def sum_squares(model: nn.Module) -> float:
    gradients = (parameter.grad for parameter in model.parameters())
    return sum(float(grad.double().pow(2).sum()) for grad in gradients if grad is not None)


def whole_weights(model: nn.Module) -> torch.Tensor:
    """The weights as one vector, with the shards of all ranks."""
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([each.detach().reshape(-1).clone() for each in found])


def fail(*_: object) -> NoReturn:
    """Raise, as a hook or a step may."""
    raise ZeroDivisionError


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
