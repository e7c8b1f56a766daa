"""What FP8 flushes to zero, by torch's own cast and by exact fractions."""

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite

import torch

DTYPES = {
    "input": torch.float8_e4m3fn,
    "weight": torch.float8_e4m3fn,
    "gradient": torch.float8_e5m2,
}


def by_cast(tensor: torch.Tensor, operand: str) -> tuple[float, float, float]:
    """Return non-finite, non-zero and flushed elements: scaled in float64, and cast by torch."""
    values = tensor.detach().double().flatten()
    finite = values[values.isfinite()]
    nonzero = finite[finite != 0.0]
    if not len(nonzero):
        return float(len(values) - len(finite)), 0.0, 0.0
    dtype = DTYPES[operand]
    scaled = nonzero * (torch.finfo(dtype).max / nonzero.abs().max())
    flushed = int((scaled.to(dtype).float() == 0.0).sum())
    return float(len(values) - len(finite)), float(len(nonzero)), float(flushed)


def by_fractions(values: Sequence[float], operand: str) -> tuple[float, float, float]:
    """Return the same without any rounding."""
    finite = [abs(Fraction(value)) for value in values if isfinite(value)]
    nonzero = [value for value in finite if value]
    info = torch.finfo(DTYPES[operand])
    smallest = Fraction(info.tiny) * Fraction(info.eps)
    amax = max(nonzero, default=Fraction(1))
    flushed = [v for v in nonzero if v * Fraction(info.max) / amax <= smallest / 2]
    return float(len(values) - len(finite)), float(len(nonzero)), float(len(flushed))
