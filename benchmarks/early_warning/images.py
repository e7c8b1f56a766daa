"""A convolutional network that classifies noisy images."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.early_warning.tasks import Losses, OfStep, unchanged

BATCH = 32
CLASSES = 10
_SIDE = 16
_SMOOTHING = 0.1
"""Label smoothing, below which no loss falls: what is left of it scatters little."""
_CHANNELS = (16, 32, 64)


class Images:
    """Patterns under noise; the same ones for a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._patterns = torch.randn(CLASSES, 3, _SIDE, _SIDE, generator=self._generator)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images [BATCH, 3, side, side] of variance 1 to 2, and their labels [BATCH]."""
        generator = self._generator
        label = torch.randint(CLASSES, (BATCH,), generator=generator)
        noise = torch.randn(BATCH, 3, _SIDE, _SIDE, generator=generator)
        images = 0.4 * self._patterns[label] + noise
        return images, label


class HalfNorm(nn.Module):
    """Batch normalization whose variance is E[x²] − E[x]², computed in the dtype of its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [B, C, H, W] of the input's dtype."""
        over = (0, 2, 3)
        mean = inputs.mean(over, keepdim=True)
        variance = inputs.square().mean(over, keepdim=True) - mean.square()
        scaled: torch.Tensor = (inputs - mean) * (variance + 1e-4).rsqrt()
        return scaled * self.weight.to(inputs.dtype) + self.bias.to(inputs.dtype)


def _network(hidden: int, *, half_norm: bool) -> nn.Sequential:
    parts: list[nn.Module] = []
    before = 3
    for channels in _CHANNELS:
        parts.append(nn.Conv2d(before, channels, 3, stride=2, padding=1))
        parts.append(HalfNorm(channels) if half_norm else nn.BatchNorm2d(channels))
        parts.append(nn.ReLU())
        before = channels
    flat = before * (_SIDE // 2 ** len(_CHANNELS)) ** 2
    parts += [nn.Flatten(), nn.Linear(flat, hidden), nn.ReLU()]
    parts += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)]
    return nn.Sequential(*parts)


_HIDDEN = (900, 960)


class ImageTask:
    """Classifies the images; the probe sees the loss by itself."""

    def __init__(
        self,
        seed: int,
        *,
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
        half_norm: bool = False,
        brightness: OfStep = unchanged,
    ) -> None:
        self.model = _network(_HIDDEN[seed % len(_HIDDEN)], half_norm=half_norm).to(dtype)
        self._data = Images(seed)
        self._dtype, self._autocast, self._brightness = dtype, autocast, brightness

    def losses(self, step: int) -> Losses:
        """Go forward with the next images."""
        images, labels = self._data.batch()
        images = (images * self._brightness(step)).to(self._dtype)
        with torch.autocast("cpu", self._autocast, enabled=self._autocast is not None):
            logits = self.model(images)
        loss = functional.cross_entropy(logits.float(), labels, label_smoothing=_SMOOTHING)
        return Losses(trained=loss, course=loss.detach())
