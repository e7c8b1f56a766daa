"""How much of each gradient FP16 loses at a given loss scale: below 2**-24 it becomes zero."""

import torch

SMALLEST = 2.0**-24


def underflow_share(gradient: torch.Tensor, loss_scale: float) -> float:
    """Return the share of non-zero elements that scaling leaves below FP16's smallest number."""
    magnitudes = gradient.float().abs()
    nonzero = magnitudes > 0
    lost = nonzero & (magnitudes * loss_scale < SMALLEST / 2)
    return float(lost.sum() / nonzero.sum().clamp(min=1))


gradient = torch.randn(10_000) * 1e-8
assert underflow_share(gradient, 1.0) > 0.9
assert underflow_share(gradient, 65536.0) < 0.01

# A scaler that fell too low climbs back by itself, twofold every `growth_interval` clean steps.
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=500)
