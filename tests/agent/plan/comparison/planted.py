"""Models with a numerical mistake at a known place, between sound layers."""

import torch
from torch import nn

WIDTH = 32


class Overflowing(nn.Module):
    """Its product is beyond 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(5e4 * torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight) / 5e4


class NaiveSoftmax(nn.Module):
    """A softmax without subtracting the largest logit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        powers = torch.exp(8 * x)
        return powers / powers.sum(-1, keepdim=True)


class Softmax(nn.Module):
    """A softmax over logits so far apart that most probabilities are below what FP16 holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(10 * x, -1)


class DifferenceOfMeans(nn.Module):
    """The variance as E[x²] − E[x]², of values with a large mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 3 * x + 30 + x[:, :1]
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        spread: torch.Tensor = variance.expand_as(x)
        return spread


class TinyEpsilon(nn.Module):
    """An epsilon that is zero in FP16 guards against a division by zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.relu(x - 100)
        return x + kept / (kept.square().sum(-1, keepdim=True) + 1e-8)


class Chain(nn.Module):
    """Sound layers around the one that is given."""

    def __init__(self, planted: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.planted = planted
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.act = nn.GELU()
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        logits: torch.Tensor = self.last(self.act(self.middle(self.planted(x))))
        return logits


def chain(planted: nn.Module) -> Chain:
    """Return the chain with the same weights every time."""
    torch.manual_seed(11)
    return Chain(planted)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [16, 8] and classes [16]."""
    generator = torch.Generator().manual_seed(12)
    return (
        torch.randn(16, 8, generator=generator),
        torch.randint(0, 4, (16,), generator=generator),
    )
