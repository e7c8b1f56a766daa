"""What is remembered of one series, and windows over it."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from math import ceil, floor, fsum, hypot, sqrt
from typing import NamedTuple

_FORGOTTEN_AT_ONCE = 64
_MOVES_AT_MOST = 512
"""Changes of a series between two judgements whose steps are known."""


class Stretch:
    """A time in which a series was seen: one period, or several in which it stood at one value.

    samples: periods that it fills; the last reading of each counts as its sample. low, high: over
    all readings. rise, changes, resets: since the series was first seen, up to this stretch's end.
    ended: whether the series was not there afterwards.
    """

    __slots__ = (
        "changes",
        "ended",
        "first_seconds",
        "high",
        "last_seconds",
        "low",
        "period",
        "resets",
        "rise",
        "samples",
        "value",
    )

    def __init__(self, value: float, now_seconds: float, period: int) -> None:
        self.first_seconds = self.last_seconds = now_seconds
        self.period = period
        self.samples = 1
        self.value = self.low = self.high = value
        self.rise = 0.0
        self.changes = self.resets = 0
        self.ended = False


class StepChange(NamedTuple):
    """A reading that differed from the one before, or was the first."""

    step: int
    """The run's last step then."""
    value: float
    rise: float
    """Rise of the series since it was first seen."""


class Standing(NamedTuple):
    """What a series had done from when it was first seen up to a moment."""

    rise: float
    changes: int
    resets: int


class History:
    """The readings of one series over the last `horizon_seconds`.

    It is what a Prometheus that scrapes once per `period_seconds` would have, and more: extremes,
    increments, changes and resets count every reading. known_value: what the series stood at
    before anything was remembered; None counts its first reading as risen from 0.
    """

    __slots__ = (
        "_born_seconds",
        "_born_value",
        "_changes",
        "_forgotten",
        "_horizon_seconds",
        "_known_before",
        "_period_seconds",
        "_resets",
        "_rise",
        "_rise_before",
        "_round",
        "_value_before",
        "alive",
        "high",
        "low",
        "moves",
        "stretches",
        "update_number",
        "value",
    )

    def __init__(
        self, period_seconds: float, horizon_seconds: float, known_value: float | None = None
    ) -> None:
        self._period_seconds = period_seconds
        self._horizon_seconds = horizon_seconds
        self._known_before = known_value is not None
        self._born_seconds = float("-inf")
        self._born_value = 0.0
        self._round = -1
        self._rise = 0.0
        self._changes = self._resets = 0
        self._forgotten = Standing(0.0, 0, 0)
        self.stretches: list[Stretch] = []
        self.alive = False
        """Whether the series was there at the last complete reading."""
        self.update_number = 0
        """Number of the last complete reading that held it."""
        self.value = self.low = self.high = known_value or 0.0
        """Last reading, and the extremes of the present round."""
        self.moves: list[StepChange] = []
        """The changes of the present round, the oldest first."""
        self._value_before: float | None = None
        self._rise_before = 0.0

    @property
    def at_zero(self) -> bool:
        """Whether the series is there, and has never been seen at anything but 0."""
        return self.alive and len(self.stretches) == 1 and self.low == self.high == self._rise == 0

    def add(self, value: float, now_seconds: float, round_: int, step: int = 0) -> bool:
        """Take a reading; return whether the value or an extreme is another than before.

        Extremes start again with each `round_`; times never go back. step: the run's last step.
        """
        if not self.stretches and not self._known_before:
            self._born_seconds, self._born_value = now_seconds, value
        moved = not self.alive or value != self.value
        changed = moved or (round_ != self._round and self.low != self.high)
        if round_ != self._round:
            self.moves = []
            self._value_before = self.value if self.alive else None
            self._rise_before = self._rise
        if moved:
            self._count(value)
            if len(self.moves) < _MOVES_AT_MOST:
                self.moves.append(StepChange(step, value, self._rise))
        if round_ != self._round:
            self._round = round_
            self.low = self.high = value
        elif value < self.low:
            self.low = value
        elif value > self.high:
            self.high = value
        self.value = value
        stretch = self._stretch_for(value, now_seconds)
        stretch.rise, stretch.changes, stretch.resets = self._rise, self._changes, self._resets
        self.alive = True
        return changed

    def end(self) -> None:
        """Note that the series is no longer there."""
        self.alive = False
        self.stretches[-1].ended = True

    def expired(self, now_seconds: float) -> bool:
        """Return whether nothing of the series is worth remembering."""
        oldest_seconds = now_seconds - self._horizon_seconds
        return not self.alive and self.stretches[-1].last_seconds < oldest_seconds

    def at(self, time_seconds: float) -> float | None:
        """Return what the series stood at; None where it was not there."""
        index = self._index_at(time_seconds)
        if index < 0:
            return None
        stretch = self.stretches[index]
        gone = stretch.ended and time_seconds > stretch.last_seconds
        return None if gone else stretch.value

    def extremes_until(self, step: int) -> tuple[float, float] | None:
        """Return the lowest and highest value of the present round up to a step.

        None where the series was not there yet.
        """
        values = [move.value for move in self.moves if move.step <= step]
        if values:
            return min(values), max(values)
        return None if self._value_before is None else (self._value_before, self._value_before)

    def rise_after(self, step: int) -> float:
        """Return by how much the series rose in the present round after a step."""
        known = self._rise_before
        for move in self.moves:
            if move.step > step:
                break
            known = move.rise
        return self._rise - known

    def within(self, start_seconds: float, end_seconds: float) -> list[Stretch]:
        """Return the stretches of which something lies in the time given, both ends included."""
        stretches = self.stretches
        first = bisect_left(stretches, start_seconds, key=_last_seconds)
        after = bisect_right(stretches, end_seconds, lo=first, key=_first_seconds)
        if after > first and _cut(stretches[after - 1], end_seconds):
            after -= 1
        return stretches[first:after]

    def samples(self, start_seconds: float, end_seconds: float) -> Iterator[tuple[float, float]]:
        """Yield (time, value) of the samples in the time given; one at least if it was seen."""
        for stretch in self.within(start_seconds, end_seconds):
            if stretch.samples == 1:
                yield stretch.last_seconds, stretch.value
            else:
                for time_seconds in _times(stretch, start_seconds, end_seconds):
                    yield time_seconds, stretch.value

    def known(self, start_seconds: float, end_seconds: float) -> bool:
        """Return whether the series was seen in the time given, or known before all memory."""
        if self._known_before and (
            not self.stretches or self.stretches[0].first_seconds > end_seconds
        ):
            return True
        return bool(self.within(start_seconds, end_seconds))

    def standing_at(self, time_seconds: float) -> Standing:
        """Return what the series had done up to a moment."""
        index = self._index_at(time_seconds)
        if index >= 0 and _cut(self.stretches[index], time_seconds):
            index -= 1
        if index < 0:
            return self._forgotten
        stretch = self.stretches[index]
        return Standing(stretch.rise, stretch.changes, stretch.resets)

    def born_with(self, start_seconds: float) -> float:
        """Return the first value of a counter that was first seen after a moment, else 0."""
        return self._born_value if self._born_seconds > start_seconds else 0.0

    def _count(self, value: float) -> None:
        if not self.stretches and not self._known_before:
            self._rise = value
        elif value > self.value:
            self._rise += value - self.value
            self._changes += 1
        elif value < self.value:
            self._rise += value
            self._changes += 1
            self._resets += 1

    def _stretch_for(self, value: float, now_seconds: float) -> Stretch:
        """Return the stretch that a reading belongs to: the newest, if it fits, else a new one."""
        period = floor(now_seconds / self._period_seconds)
        if self.alive:
            newest = self.stretches[-1]
            if newest.period == period and newest.samples == 1:
                newest.value = value
                newest.low, newest.high = min(newest.low, value), max(newest.high, value)
                newest.last_seconds = now_seconds
                return newest
            if newest.low == newest.high == value:
                newest.samples += newest.period != period
                newest.period, newest.last_seconds = period, now_seconds
                return newest
            if newest.period == period:
                newest.samples -= 1  # the sample of this period is the new value
        self._forget(now_seconds - self._horizon_seconds)
        stretch = Stretch(value, now_seconds, period)
        self.stretches.append(stretch)
        return stretch

    def _forget(self, oldest_seconds: float) -> None:
        """Drop what is older, many at a time, since each time the rest is moved."""
        stretches = self.stretches
        if len(stretches) > _FORGOTTEN_AT_ONCE:
            newest = stretches[_FORGOTTEN_AT_ONCE - 1]
            if newest.last_seconds < oldest_seconds:
                self._forgotten = Standing(newest.rise, newest.changes, newest.resets)
                del stretches[:_FORGOTTEN_AT_ONCE]

    def _index_at(self, time_seconds: float) -> int:
        """Return the index of the last stretch that began by then; -1 when there is none."""
        return bisect_right(self.stretches, time_seconds, key=_first_seconds) - 1


def _last_seconds(stretch: Stretch) -> float:
    return stretch.last_seconds


def _first_seconds(stretch: Stretch) -> float:
    return stretch.first_seconds


def _cut(stretch: Stretch, end_seconds: float) -> bool:
    """Return whether a single sample that is taken at a stretch's end comes only after `end`."""
    return stretch.samples == 1 and stretch.last_seconds > end_seconds


def _times(stretch: Stretch, start_seconds: float, end_seconds: float) -> Iterator[float]:
    """Yield the times of a steady stretch's samples, as if they came at equal distances."""
    distance = (stretch.last_seconds - stretch.first_seconds) / (stretch.samples - 1)
    begun = stretch.first_seconds
    first = max(ceil((start_seconds - begun) / distance - 1e-6), 0)
    last = min(floor((end_seconds - begun) / distance + 1e-6), stretch.samples - 1)
    if first > last:
        yield start_seconds
    for index in range(first, last + 1):
        yield begun + index * distance


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
"""Computes a value from a window in which something was seen."""


def _mean(window: Window) -> float:
    return _mean_of(window.values())


def _mean_of(values: list[float]) -> float:
    """Return the mean; exactly the value where all are equal."""
    return values[0] + fsum((value - values[0]) / len(values) for value in values)


def _deviation(window: Window) -> float:
    values = window.values()
    mean = _mean_of(values)
    return hypot(*(value - mean for value in values)) / sqrt(len(values))


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
