"""Small models to recommend for."""

import torch
from torch import nn


def odd_network() -> tuple[nn.Sequential, tuple[torch.Tensor, torch.Tensor], nn.Module]:
    """Return a model whose middle layer has 50 features, with a batch and a loss."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 50), nn.Linear(50, 8)
    )
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(32, 16, generator=generator)
    return model, (inputs, torch.randint(0, 8, (32,), generator=generator)), nn.CrossEntropyLoss()
