"""Medians and median absolute deviations of a few hundred numbers; always finite."""

from collections.abc import Sequence
from sys import float_info

LARGEST = float_info.max
_OUTER_TENTHS = 3.8
"""Distance of the outer tenths of a normal distribution, in median absolute deviations."""


def median(values: Sequence[float]) -> float:
    """Return the median of finite values; for an even number, the mean of the middle two.

    Raises ValueError when there are none.
    """
    if not values:
        raise ValueError("no values, no median")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    low, high = ordered[middle - 1], ordered[middle]
    mean = (low + high) / 2
    return mean if abs(mean) <= LARGEST else low / 2 + high / 2


def deviation(values: Sequence[float], center: float) -> float:
    """Return the median of the values' distances from `center`; 0 of a constant series."""
    return median([min(abs(value - center), LARGEST) for value in values])


def breadth(values: Sequence[float], center: float) -> float:
    """Return the deviation, but at least the one implied by the outer tenths.

    The median deviation of two clusters, such as losses of which half are exactly 0, is nearly 0.
    """
    ordered = sorted(values)
    tenth = len(ordered) // 10
    between = ordered[-1 - tenth] / _OUTER_TENTHS - ordered[tenth] / _OUTER_TENTHS
    return max(deviation(values, center), min(between, LARGEST))
