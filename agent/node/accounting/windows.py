"""Medians and windows over past steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, fsum, hypot, sqrt
from sys import float_info

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.merged import MergedStep

LARGEST = float_info.max
MAIN = ""
"""Key of the gradients of the main optimizer, or of the whole model."""
_ROOM = 8.0
"""Divisor, exact in binary, with which differences along a trend stay within float64."""
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


def mean(values: Sequence[float]) -> float:
    """Return the mean of finite values, whose sum may lie beyond float64."""
    return fsum(value / len(values) for value in values)


def standard_deviation(values: Sequence[float]) -> float:
    """Return that of the values as a whole, which are finite, to rounding; Inf beyond float64."""
    largest = max(map(abs, values))
    if largest == 0.0:
        return 0.0
    scaled = [value / largest for value in values]
    center = fsum(scaled) / len(scaled)
    return largest * (hypot(*(each - center for each in scaled)) / sqrt(len(scaled)))


def scatter_around_trend(values: Sequence[float], count: int) -> float:
    """Return the breadth of the last `count` values around a line through their thirds.

    Fewer values are a poor estimate, for which they count as wider.
    """
    recent = [value / _ROOM for value in values[-count:]]
    third, last = max(1, len(recent) // 3), len(recent) - 1
    begin, end = median(recent[:third]), median(recent[-third:])
    slope = (end - begin) / max(1, len(recent) - third)
    around = sorted(value - slope * (index - last) for index, value in enumerate(recent))
    breadth = breadth_of_sorted(around, median_of_sorted(around))
    return min(_ROOM * breadth * sqrt(count / len(recent)), LARGEST)


def _nearest(ordered: Sequence[float], center: float, size: int) -> tuple[int, int]:
    """Return the indices of the first and the last of the `size` values nearest to `center`.

    They are adjacent. From run to run of that many values the first one comes nearer
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


Bucket = tuple[int, float, float]
"""(period number, largest value, smallest value)."""

_BUCKETS_PER_WINDOW = 120


class ValueWindow:
    """Keeps the extremes per period, so that a window costs the same at any step rate.

    The newest value always belongs to the window: a run whose steps take longer than the window
    still exports its last value.
    """

    def __init__(self, window_seconds: float, buckets: list[Bucket] | None = None) -> None:
        """buckets: of earlier values, changed in place."""
        self.window_seconds = window_seconds
        self._period_seconds = window_seconds / _BUCKETS_PER_WINDOW
        self.buckets = [] if buckets is None else buckets

    def add(self, value: float, time_unix_seconds: float) -> None:
        """Add a value; an earlier time than the newest counts into the newest period.

        By a clock that is set back by more than a window, what was kept becomes as much earlier:
        else it would stay until the clock has caught up.
        """
        period = floor(time_unix_seconds / self._period_seconds)
        if self.buckets and (back := self.buckets[-1][0] - period) > _BUCKETS_PER_WINDOW:
            self.buckets[:] = [(then - back, high, low) for then, high, low in self.buckets]
        if self.buckets and self.buckets[-1][0] >= period:
            last, largest, smallest = self.buckets[-1]
            self.buckets[-1] = (last, max(largest, value), min(smallest, value))
        else:
            self.buckets.append((period, value, value))
            self._forget(period)

    def extremes(self, time_unix_seconds: float) -> tuple[float, float] | None:
        """Return (largest, smallest) over the window that ends now; None before any value."""
        self._forget(floor(time_unix_seconds / self._period_seconds))
        if not self.buckets:
            return None
        _, largest, smallest = zip(*self.buckets, strict=True)
        return max(largest), min(smallest)

    def clear(self) -> None:
        """Forget all values."""
        self.buckets.clear()

    def _forget(self, period: int) -> None:
        """Drop what is older than the window, keeping the newest bucket."""
        oldest = period - _BUCKETS_PER_WINDOW
        outdated = 0
        while outdated < len(self.buckets) - 1 and self.buckets[outdated][0] < oldest:
            outdated += 1
        del self.buckets[:outdated]


@dataclass(slots=True, kw_only=True)
class NormWindows(Tracker):
    """The norms that count within the last `window_seconds`: the run's, and each optimizer's."""

    norms: list[Bucket] = field(default_factory=list)
    optimizers: dict[str, list[Bucket]] = field(default_factory=dict)
    """Norms of the optimizers that the ranks hold, by name."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add the norms of a closed step; drop optimizers that no rank holds."""
        if step.gradients_judged and (norm := step.grad_norm) is not None:
            _add(self.norms, norm, step, context)
        for name in self.optimizers.keys() - step.optimizers_held:
            del self.optimizers[name]
        for name, own in step.optimizers.items():
            if own.judged and (norm := own.grad_norm) is not None:
                _add(self.optimizers.setdefault(name, []), norm, step, context)

    def view(
        self, context: AccountContext, time_unix_seconds: float
    ) -> dict[str, tuple[float, float]]:
        """Return the largest and smallest norms over the window that ends now, by optimizer."""
        found = {}
        for name, buckets in {MAIN: self.norms, **self.optimizers}.items():
            window = ValueWindow(context.window_seconds, list(buckets))
            if (extremes := window.extremes(time_unix_seconds)) is not None:
                found[name] = extremes
        return found


def _add(buckets: list[Bucket], norm: float, step: MergedStep, context: AccountContext) -> None:
    ValueWindow(context.window_seconds, buckets).add(norm, step.time_unix_seconds)
