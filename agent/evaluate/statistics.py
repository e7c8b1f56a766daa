"""Ratios of paired times, and differences of losses."""

from collections.abc import Sequence
from math import comb, isfinite
from statistics import fmean, median

_CONFIDENCE = 0.9


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float]
) -> tuple[float, tuple[float, float]]:
    """Return the median of the ratios of pairs, and its 90 % interval.

    The interval lies between two order statistics: the number of ratios below the true median is
    binomial with probability 1/2. With fewer than five pairs it is their whole range, which covers
    less than 90 %.
    """
    ratios = sorted(one / other for one, other in zip(numerators, denominators, strict=True))
    count, rank = len(ratios), 0
    below = 1.0
    while 2 * below <= (1 - _CONFIDENCE) * 2.0**count:
        rank += 1
        below += comb(count, rank)
    # `rank` values are outside on each side.
    return median(ratios), (ratios[max(0, rank - 1)], ratios[min(count - 1, count - rank)])


def tail_difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return |a − b| / |b| of the mean losses of the last fifth of the steps.

    None unless both means are finite; 0 where both are zero.
    """
    tail = max(1, len(reference) // 5)
    mean, expected = fmean(losses[-tail:]), fmean(reference[-tail:])
    if not (isfinite(mean) and isfinite(expected)):
        return None
    if expected == 0:
        return 0.0 if mean == 0 else None
    return abs(mean - expected) / abs(expected)


def relative_differences(values: Sequence[float], reference: Sequence[float]) -> list[float | None]:
    """Return |a − b| / |b| of each step; None where there is none, or where it is zero."""
    found: list[float | None] = []
    for value, expected in zip(values, reference, strict=True):
        known = isfinite(value) and isfinite(expected) and expected != 0 and value != expected
        found.append(abs(value - expected) / abs(expected) if known else None)
    return found
