"""Medians and median absolute deviations of a few hundred numbers; always finite."""

from collections.abc import Sequence
from sys import float_info

import numpy as np

from mp_agent.records.steps import FloatArray

LARGEST = float_info.max
_ARRAY_FROM = 48
"""Number of values from which on an array is faster than a list."""
_OUTER_TENTHS = 3.8
"""Distance of the outer tenths of a normal distribution, in median absolute deviations."""


def median(values: Sequence[float]) -> float:
    """Return the median of finite values; for an even number, the mean of the middle two.

    Raises ValueError when there are none.
    """
    if not values:
        raise ValueError("no values, no median")
    middle = len(values) // 2
    if len(values) >= _ARRAY_FROM:
        return median_of_array(np.array(values))
    ordered = sorted(values)
    return ordered[middle] if len(ordered) % 2 else _between(ordered[middle - 1], ordered[middle])


def median_of_array(values: FloatArray) -> float:
    """Return the same median of the finite values of an array [N], N above 0."""
    middle = values.size // 2
    parted = values.copy()
    if values.size % 2:
        parted.partition(middle)
        return float(parted[middle])
    parted.partition(middle)
    # What stands before the upper one of the middle two is not in order.
    return _between(float(parted[:middle].max()), float(parted[middle]))


def deviation(values: Sequence[float], center: float) -> float:
    """Return the median of the values' distances from `center`; 0 of a constant series."""
    if len(values) >= _ARRAY_FROM:
        return deviation_of_array(np.array(values), center)
    return median([min(abs(value - center), LARGEST) for value in values])


def deviation_of_array(values: FloatArray, center: float) -> float:
    """Return the same deviation of the finite values of an array [N], N above 0."""
    with np.errstate(over="ignore"):
        distances = np.abs(values - center)
    return median_of_array(np.minimum(distances, LARGEST))


def breadth(values: Sequence[float], center: float) -> float:
    """Return the deviation, but at least the one implied by the outer tenths.

    The median deviation of two clusters, such as losses of which half are exactly 0, is nearly 0.
    """
    ordered = sorted(values)
    tenth = len(ordered) // 10
    between = ordered[-1 - tenth] / _OUTER_TENTHS - ordered[tenth] / _OUTER_TENTHS
    return max(deviation(values, center), min(between, LARGEST))


def _between(low: float, high: float) -> float:
    mean = (low + high) / 2
    return mean if abs(mean) <= LARGEST else low / 2 + high / 2
