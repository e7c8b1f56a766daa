"""Largest and smallest value over a time window, in bounded memory."""

from math import floor

Bucket = tuple[int, float, float]
"""A period's number, its largest and its smallest value."""

_BUCKETS_PER_WINDOW = 120


class ValueWindow:
    """Remembers extremes per period, so that a window costs the same at any step rate.

    The newest value always belongs to the window: a run whose steps take longer than the window
    still shows its last one.
    """

    def __init__(self, window_seconds: float, buckets: list[Bucket] | None = None) -> None:
        self.window_seconds = window_seconds
        self._period_seconds = window_seconds / _BUCKETS_PER_WINDOW
        self.buckets = list(buckets or [])

    def add(self, value: float, time_unix_seconds: float) -> None:
        """Take a value in; times that go backwards count as the newest period."""
        period = floor(time_unix_seconds / self._period_seconds)
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
        kept = [bucket for bucket in self.buckets[:-1] if bucket[0] >= oldest]
        self.buckets = [*kept, *self.buckets[-1:]]
