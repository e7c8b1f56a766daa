"""What two engines' log-probabilities say, in NumPy from all tokens at once."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Of the tokens that are chosen and finite in both; None where that has no value."""

    tokens: int
    nonfinite: int
    k1: float | None = None
    k3: float | None = None
    largest: float | None = None
    tail: float | None = None
    """The 99.9th percentile of |Δ|: the smallest that no more than one in a thousand exceed."""
    correlation: float | None = None
    effective: float | None = None


def expected_of(trainer: Array, sampler: Array, mask: Array | None = None) -> Expected:
    """Compare in float64; what overflows there is not for this reference."""
    trainer, sampler = trainer.astype(np.float64).ravel(), sampler.astype(np.float64).ravel()
    chosen = np.ones(trainer.shape, bool) if mask is None else mask.ravel() != 0
    finite = np.isfinite(trainer) & np.isfinite(sampler)
    nonfinite = int((chosen & ~finite).sum())
    trainer, sampler = trainer[chosen & finite], sampler[chosen & finite]
    if not trainer.size:
        return Expected(tokens=0, nonfinite=nonfinite)
    log_ratio = trainer - sampler
    ratio = np.exp(log_ratio)
    varies = trainer.std() > 0.0 and sampler.std() > 0.0
    return Expected(
        tokens=trainer.size,
        nonfinite=nonfinite,
        k1=float(np.mean(sampler - trainer)),
        k3=float(np.mean(ratio - 1.0 - log_ratio)),
        largest=float(np.abs(log_ratio).max()),
        tail=float(np.quantile(np.abs(log_ratio), 0.999, method="inverted_cdf")),
        correlation=float(np.corrcoef(trainer, sampler)[0, 1]) if varies else None,
        effective=float(ratio.sum() ** 2 / (ratio**2).sum() / ratio.size),
    )
