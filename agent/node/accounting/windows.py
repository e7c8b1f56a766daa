"""Largest and smallest value within a time window, in bounded memory."""

from collections.abc import Mapping, Sequence
from math import floor

from mp_agent.records.merged import MergedStep

Bucket = tuple[int, float, float]
"""(period number, largest value, smallest value)."""

_BUCKETS_PER_WINDOW = 120


class ValueWindow:
    """Keeps the extremes per period, so that a window costs the same at any step rate.

    The newest value always belongs to the window: a run whose steps take longer than the window
    still exports its last value.
    """

    def __init__(self, window_seconds: float, buckets: list[Bucket] | None = None) -> None:
        self.window_seconds = window_seconds
        self._period_seconds = window_seconds / _BUCKETS_PER_WINDOW
        self.buckets = list(buckets or [])

    def add(self, value: float, time_unix_seconds: float) -> None:
        """Add a value; an earlier time than the newest counts into the newest period."""
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
        outdated = 0
        while outdated < len(self.buckets) - 1 and self.buckets[outdated][0] < oldest:
            outdated += 1
        del self.buckets[:outdated]


class OptimizerWindows:
    """One window per optimizer that the ranks hold, by name."""

    def __init__(
        self, window_seconds: float, buckets: Mapping[str, Sequence[Bucket]] | None = None
    ) -> None:
        self._window_seconds = window_seconds
        self._windows = {
            name: ValueWindow(window_seconds, list(own)) for name, own in (buckets or {}).items()
        }

    @property
    def buckets(self) -> dict[str, list[Bucket]]:
        """The windows in the form that the constructor accepts."""
        return {name: window.buckets for name, window in self._windows.items()}

    def fold(self, step: MergedStep) -> None:
        """Add the norms of a closed step that count; drop optimizers that no rank holds."""
        for name in self._windows.keys() - step.optimizers_held:
            del self._windows[name]
        for name, own in step.optimizers.items():
            if own.judged and (norm := own.grad_norm) is not None:
                window = self._windows.setdefault(name, ValueWindow(self._window_seconds))
                window.add(norm, step.time_unix_seconds)

    def extremes(self, time_unix_seconds: float) -> dict[str, tuple[float, float]]:
        """Return (largest, smallest) norm over the window that ends now, per optimizer."""
        found = {name: window.extremes(time_unix_seconds) for name, window in self._windows.items()}
        return {name: extremes for name, extremes in found.items() if extremes is not None}

    def clear(self) -> None:
        """Forget all values."""
        self._windows.clear()
