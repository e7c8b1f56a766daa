"""All series of a run that conditions look at, with their histories."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from mp_agent.alerting.detector.history import History

Labels = tuple[tuple[str, str], ...]
"""Label names and values of one series, without those of the run."""

Key = tuple[str, Labels]
"""Metric name, as exposed, and labels."""

Reading = tuple[Key, float]

SERIES_MAX = 20_000
"""Series that are remembered at most; what comes beyond is not judged."""

STEPS_MAX = 4096
"""Latest steps that are remembered by number: more than any condition counts."""


KnownValue = Callable[[str, Labels, float], float | None]
"""From a series and its first reading to what it stood at before; None: it begins with that."""


def nothing_known(name: str, labels: Labels, value: float) -> float | None:
    """Say that a series begins with its first reading."""
    return None


class Readings:
    """Remembers what the conditions need of each reading, and says what it was."""

    def __init__(
        self,
        period_seconds: float,
        *,
        known_value: KnownValue = nothing_known,
    ) -> None:
        self.period_seconds = period_seconds
        self._known_value = known_value
        self._horizons: dict[str, float] = {}
        self._series: dict[str, dict[Labels, History]] = {}
        self._count = 0
        self._round = self._updates = 0
        self._changed_at: dict[str, int] = {}
        self.changes = 0
        """How often a series or its extremes have changed, or a series began, ended or went."""
        self._steps: deque[int] = deque(maxlen=STEPS_MAX)
        self.left_out = 0
        """Series that were not remembered because there were too many."""

    @property
    def names(self) -> frozenset[str]:
        """The metric names that are remembered; others need not be read."""
        return frozenset(self._horizons)

    def need(self, name: str, horizon_seconds: float) -> None:
        """Remember the series called `name` that far back; before the first reading."""
        known = self._horizons.get(name, 0.0)
        self._horizons[name] = max(known, horizon_seconds + self.period_seconds)
        self._series.setdefault(name, {})

    def update(
        self,
        readings: Iterable[Reading],
        now_seconds: float,
        step: int = 0,
        evidence_steps: Mapping[Key, int] = MappingProxyType({}),
    ) -> None:
        """Take a complete reading, after a step; a series that is not in it has ended.

        evidence_steps: of series whose change is evidence of an earlier step.
        """
        self._updates += 1
        self.note_step(step)
        if self._add(readings, now_seconds, step, evidence_steps) < self._count:
            self._end_others(now_seconds)

    def _end_others(self, now_seconds: float) -> None:
        """End the series that were not in this reading, and forget those that ended long ago."""
        for name, series in self._series.items():
            for labels in [
                key for key, history in series.items() if history.update_number != self._updates
            ]:
                if series[labels].alive:
                    series[labels].end()
                elif series[labels].expired(now_seconds):
                    del series[labels]
                    self._count -= 1
                else:
                    continue
                self._note_change(name)

    def update_some(
        self,
        readings: Iterable[Reading],
        now_seconds: float,
        step: int = 0,
        evidence_steps: Mapping[Key, int] = MappingProxyType({}),
    ) -> None:
        """Take readings of a few series, after a step; nothing is said of the others."""
        self.note_step(step)
        self._add(readings, now_seconds, step, evidence_steps)

    def note_step(self, step: int) -> None:
        """Remember the number of a step, of which logs need not have every one; 0: of none."""
        if step and self._steps and step < self._steps[-1]:
            self._steps.clear()
        if step and not (self._steps and self._steps[-1] == step):
            self._steps.append(step)

    def first_of(self, count: float, step: int) -> int:
        """Return the first of the last `count` steps that end with `step`, as far as is known."""
        place = bisect_right(self._steps, step) - max(int(count), 1)
        known = self._steps[max(place, 0)] if self._steps else step
        return max(1, min(known, step) + min(place, 0))

    def same(self, names: Iterable[str], changes: int) -> bool:
        """Return whether no series of the metrics changed since there were so many `changes`."""
        changed_at = self._changed_at
        return all(changed_at.get(name, 0) <= changes for name in names)

    def begin_round(self) -> None:
        """Restart the extremes: what was read so far has been judged."""
        self._round += 1

    def moved_steps(self, names: Iterable[str]) -> set[int]:
        """Return the steps of this round on which a series of one of the metrics changed."""
        return {
            move.step
            for name in names
            for history in self.series(name).values()
            if history.alive
            for move in history.moves
        }

    def series(self, name: str) -> Mapping[Labels, History]:
        """Return all series of a metric, those that have ended included."""
        return self._series.get(name, {})

    def standing(self, name: str) -> Iterator[tuple[Labels, float]]:
        """Yield labels and last reading of the series that are there now."""
        for labels, history in self.series(name).items():
            if history.alive:
                yield labels, history.value

    def _add(
        self,
        readings: Iterable[Reading],
        now_seconds: float,
        step: int,
        evidence_steps: Mapping[Key, int],
    ) -> int:
        """Add readings; return how many series were in this update for the first time."""
        round_, update, all_series, added = self._round, self._updates, self._series, 0
        for key, value in readings:
            name, labels = key
            series = all_series.get(name)
            if series is None:
                continue
            history = series.get(labels)
            if history is None:
                if self._count >= SERIES_MAX:
                    self.left_out += 1
                    continue
                known_value = self._known_value(name, labels, value)
                history = History(self.period_seconds, self._horizons[name], known_value)
                series[labels] = history
                self._count += 1
            if history.add(value, now_seconds, round_, evidence_steps.get(key, step)):
                self._note_change(name)
            added += history.update_number != update
            history.update_number = update
        return added

    def _note_change(self, name: str) -> None:
        self.changes += 1
        self._changed_at[name] = self.changes
