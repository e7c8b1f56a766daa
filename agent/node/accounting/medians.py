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
    return median_of_sorted(sorted(values))


def median_of_sorted(ordered: Sequence[float]) -> float:
    """Return the same median of ascending values."""
    if not ordered:
        raise ValueError("no values, no median")
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else _between(ordered[middle - 1], ordered[middle])


def deviation(values: Sequence[float], center: float) -> float:
    """Return the median of the values' distances from `center`; 0 of a constant series."""
    return deviation_of_sorted(sorted(values), center)


def deviation_of_sorted(ordered: Sequence[float], center: float) -> float:
    """Return the same deviation of ascending values."""
    first, last = _nearest(ordered, center, len(ordered) // 2 + 1)
    below, above = center - ordered[first], ordered[last] - center
    upper = min(max(below, above), LARGEST)
    if len(ordered) % 2:
        return upper
    # Without the one that is farthest away.
    first, last = (first + 1, last) if below > above else (first, last - 1)
    lower = max(center - ordered[first], ordered[last] - center)
    return _between(min(lower, LARGEST), upper)


def breadth_of_sorted(ordered: Sequence[float], center: float) -> float:
    """Return the deviation of ascending values, at least the one implied by the outer tenths.

    The median deviation of two clusters, such as losses of which half are exactly 0, is nearly 0.
    """
    tenth = len(ordered) // 10
    between = ordered[-1 - tenth] / _OUTER_TENTHS - ordered[tenth] / _OUTER_TENTHS
    return max(deviation_of_sorted(ordered, center), min(between, LARGEST))


def _nearest(ordered: Sequence[float], center: float, size: int) -> tuple[int, int]:
    """Return the indices of the first and the last of the `size` values nearest to `center`.

    They stand next to each other. From run to run of that many values the first one comes nearer
    and the last one goes away, hence the bisection for the run whose farther end is nearest.
    """
    low, high, reach = 0, len(ordered) - size, size - 1
    while low < high:
        run = (low + high) // 2
        if ordered[run + reach] - center >= center - ordered[run]:
            high = run
        else:
            low = run + 1
    # The run before ends nearer, and may begin nearer than this one ends.
    if low and center - ordered[low - 1] < ordered[low + reach] - center:
        low -= 1
    return low, low + reach


def _between(low: float, high: float) -> float:
    mean = (low + high) / 2
    return mean if abs(mean) <= LARGEST else low / 2 + high / 2
