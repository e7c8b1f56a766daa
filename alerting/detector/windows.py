"""What the functions of a range of time make of a series' samples in it."""

from collections.abc import Callable, Mapping
from math import fsum, sqrt
from typing import NamedTuple

from mp_agent.alerting.detector.history import History


class Window(NamedTuple):
    """A range of time in which a series is looked at, both ends included."""

    history: History
    start_seconds: float
    end_seconds: float

    @property
    def seen(self) -> bool:
        """Whether there was any sample in it."""
        return bool(self.history.within(self.start_seconds, self.end_seconds))

    def values(self) -> list[float]:
        """Return the samples' values."""
        return [value for _, value in self.history.samples(self.start_seconds, self.end_seconds)]

    def rise(self) -> float:
        """Return by how much a counter rose, across its resets."""
        end = self.history.standing_at(self.end_seconds)
        return end.rise - self.history.standing_at(self.start_seconds).rise


RangeFunction = Callable[[Window], float]
"""From a window in which something was seen."""


def _mean(window: Window) -> float:
    return _mean_of(window.values())


def _mean_of(values: list[float]) -> float:
    """Return the mean; exactly the value where all are equal."""
    return values[0] + fsum(value - values[0] for value in values) / len(values)


def _deviation(window: Window) -> float:
    values = window.values()
    mean = _mean_of(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / len(values))


def _changes(window: Window) -> float:
    end = window.history.standing_at(window.end_seconds)
    return float(end.changes - window.history.standing_at(window.start_seconds).changes)


def _resets(window: Window) -> float:
    end = window.history.standing_at(window.end_seconds)
    return float(end.resets - window.history.standing_at(window.start_seconds).resets)


def _largest(window: Window) -> float:
    return max(s.high for s in window.history.within(window.start_seconds, window.end_seconds))


def _smallest(window: Window) -> float:
    return min(s.low for s in window.history.within(window.start_seconds, window.end_seconds))


RANGE_FUNCTIONS: Mapping[str, RangeFunction] = {
    "avg_over_time": _mean,
    "changes": _changes,
    "last_over_time": lambda window: window.values()[-1],
    "max_over_time": _largest,
    "min_over_time": _smallest,
    "present_over_time": lambda window: 1.0,
    "resets": _resets,
    "stddev_over_time": _deviation,
}
"""Extremes, increments, changes and resets are of every reading, the others of one per period."""
