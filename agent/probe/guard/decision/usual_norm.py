"""What gradient norm is usual in this run, and from which one on it is a spike.

The statistic is ZClip's (arXiv 2504.02507), an exponential average of the mean and the deviation,
of the norm's logarithm: norms vary by factors, and a deviation of the norm itself is inflated by
the first large one. One number for all gradients is enough to agree on with one small collective;
AdaGC (arXiv 2502.11034), which keeps one per tensor, needs one for every tensor of a sharded model.
"""

from math import inf, log

import torch


class UsualNorm:
    """Mean and deviation of the logarithm of the norm, on the norm's device.

    z, factor: a spike is `z` deviations above the mean and `factor` times the usual norm.
    """

    def __init__(
        self,
        *,
        z: float,
        factor: float,
        warmup_steps: float,
        memory_steps: float,
        device: torch.device,
    ) -> None:
        self._z = z
        self._log_factor = log(factor)
        self._warmup_steps = warmup_steps
        self._memory_steps = memory_steps
        self._steps = torch.zeros((), dtype=torch.float64, device=device)
        self._mean = torch.zeros_like(self._steps)
        self._variance = torch.zeros_like(self._steps)

    @property
    def usual(self) -> torch.Tensor:
        """The usual norm: the geometric mean."""
        return self._mean.exp()

    @property
    def limit(self) -> torch.Tensor:
        """The norm above which one is a spike; infinity until enough steps were seen."""
        above = torch.clamp(self._z * self._variance.sqrt(), min=self._log_factor)
        learned = self._steps >= self._warmup_steps
        return torch.where(learned, (self._mean + above).exp(), inf)

    def observe(self, norm: torch.Tensor) -> None:
        """Add a norm, one far above the usual one as if it were `factor` times as large.

        NaN, Inf and 0 say nothing.
        """
        usable = torch.isfinite(norm) & (norm > 0.0)
        difference = torch.where(usable, norm, 1.0).log() - self._mean
        learned = self._steps >= self._warmup_steps
        bound = torch.where(learned, torch.full_like(self._mean, self._log_factor), inf)
        difference = torch.minimum(difference, bound)
        weight = torch.clamp((self._steps + 1.0).reciprocal(), min=1.0 / self._memory_steps)
        weight = torch.where(usable, weight, 0.0)
        self._mean = self._mean + weight * difference
        self._variance = (1.0 - weight) * (self._variance + weight * difference.square())
        self._steps = self._steps + usable.to(torch.float64)
