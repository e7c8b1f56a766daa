"""Return to training mode after each validation, whatever happens in it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back into the mode that it was in."""
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)


model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
with evaluating(model):
    print(f"validation loss: {model(torch.randn(4, 8)).square().mean():.3g}")
print(f"training mode: {model.training}")
