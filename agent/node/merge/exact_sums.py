"""Sums that come out the same, to the bit, however their terms are grouped."""

from collections.abc import Sequence
from math import fsum, isfinite, ldexp, nan

_SCALE = 64
"""Powers of two by which terms are made smaller when adding them up overflows on the way."""


def exact_parts(terms: Sequence[float]) -> tuple[float, ...]:
    """Return few floats whose exact sum is that of `terms`, and which depend on it alone.

    Terms whose sum is beyond float64 are returned as they are.
    """
    if len(terms) < 2:
        return tuple(terms)
    parts: list[float] = []
    rest = list(terms)
    try:
        while part := fsum(rest):
            if not isfinite(part):
                return tuple(terms)
            parts.append(part)
            rest.append(-part)
    except (OverflowError, ValueError):
        return tuple(terms)
    return tuple(parts) or (0.0,)


def exact_sum(terms: Sequence[float], divisor: int = 1) -> float:
    """Return the sum of `terms`, divided; Inf or NaN when it has no value in float64."""
    try:
        return fsum(terms) / divisor
    except OverflowError:
        return _large_sum(terms, divisor)
    except ValueError:
        return nan


def _large_sum(terms: Sequence[float], divisor: int) -> float:
    try:
        return ldexp(fsum(ldexp(term, -_SCALE) for term in terms) / divisor, _SCALE)
    except OverflowError:
        return float("inf")
