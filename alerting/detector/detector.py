"""Which conditions a run has, at which severity, from its readings: rules within the process."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.descriptions import InfoMark
from mp_agent.alerting.detector.interpret import Interpreter
from mp_agent.alerting.detector.readings import KnownValue, Readings, nothing_known
from mp_agent.alerting.detector.vectors import Kept, Moment, Vector
from mp_agent.alerting.durations import Duration
from mp_agent.alerting.expressions import Count, Series, walk
from mp_agent.alerting.remedies import facts_of
from mp_agent.alerting.values import Values

log = logging.getLogger("mp_agent.node")

PERIODS_PER_WINDOW = 24
"""Periods of the shortest window; in windows of minutes, one period is a few seconds."""
FINDINGS_PER_LEVEL = 100
"""Values of kept labels, such as layers, for which one level is reported at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A condition that holds at one severity, for one value of the labels that it keeps."""

    condition: Condition
    level: Level
    severity: str
    """Severity in force; the level's own, unless that was changed."""
    labels: Mapping[str, str]
    value: float
    """Value of the condition's first signal."""
    since_seconds: float
    """When it began to hold, which is `hold` before it was found."""
    since_step: int
    """The first step on which it held."""


@dataclass(frozen=True, slots=True)
class Change:
    """A finding that is new, or that is over."""

    firing: bool
    finding: Finding


@dataclass(slots=True)
class _Holding:
    """How far one alert of a level has come."""

    since_seconds: float
    since_step: int
    value: float
    found: Finding | None = None
    """The finding, once it has held for long enough."""
    absent_since_seconds: float | None = None
    keep_seconds: float = 0.0


@dataclass(slots=True)
class _Watch:
    """One level of one condition, and what of it holds."""

    condition: Condition
    level: Level
    severity: str
    evaluate: Callable[[Moment], Vector]
    count: Callable[[Moment], Vector] | None
    """Consecutive steps that show the level, where it has such a number."""
    kept: tuple[str, ...]
    hold_seconds: float
    keep_seconds: float
    reach_seconds: float
    """How far back the level looks at most."""
    names: frozenset[str]
    """The metrics that the level looks at, as they are exposed."""
    holding: dict[Kept, _Holding] = field(default_factory=dict)
    failed: bool = False

    def finding(self, labels: Mapping[str, str], holding: _Holding) -> Finding:
        """Return that the level holds."""
        return Finding(
            condition=self.condition,
            level=self.level,
            severity=self.severity,
            labels=labels,
            value=holding.value,
            since_seconds=holding.since_seconds,
            since_step=holding.since_step,
        )


class Detector:
    """Evaluates conditions over the readings of one run, with the `hold` and `keep` of each level.

    Times are of any clock that does not go back.
    """

    def __init__(
        self,
        conditions: Iterable[Condition],
        values: Values,
        *,
        known_value: KnownValue | None = None,
    ) -> None:
        """Interpret the conditions; CatalogError for one with a node that has no interpreter."""
        self._values = values
        levels = [
            (condition, level)
            for condition in conditions
            for level in condition.levels
            if values.severity(condition.name, level.severity)
        ]
        period_seconds = _period_seconds(levels, values)
        self.readings = Readings(period_seconds, known_value=known_value or nothing_known)
        interpreter = Interpreter(self.readings, values)
        self._watches = [self._watch(interpreter, condition, level) for condition, level in levels]
        for fact in (fact for condition, _ in levels for fact in facts_of(condition.remedies)):
            self.readings.need(fact.metric.prometheus_name, 0.0)
        for part in (part for _, level in levels for part in level.parts):
            if isinstance(part, InfoMark):
                self.readings.need(part.metric, 0.0)

    @property
    def levels(self) -> list[tuple[str, str]]:
        """Condition and severity of everything that can be found, in the catalog's order."""
        return [(watch.condition.name, watch.severity) for watch in self._watches]

    @property
    def findings(self) -> list[Finding]:
        """What is found at present, with its latest value, in the catalog's order."""
        return [
            replace(holding.found, value=holding.value)
            for watch in self._watches
            for holding in watch.holding.values()
            if holding.found
        ]

    @property
    def holding(self) -> bool:
        """Whether anything holds or is kept, for long enough to be found or not yet."""
        return any(watch.holding for watch in self._watches)

    @property
    def pending(self) -> bool:
        """Whether anything holds that has not held for long enough."""
        return any(
            holding.found is None for watch in self._watches for holding in watch.holding.values()
        )

    def evaluate(self, now_seconds: float, step: int = 0) -> list[Change]:
        """Judge what was read up to now, after the run's last `step`; return what that changes.

        What begins to hold does so since the first step of the readings that make it hold, which
        may be one before the last. A level that fails is logged once and stays as it was.
        """
        moment, changes = Moment(now_seconds), []
        for watch in self._watches:
            try:
                vector = watch.evaluate(moment)
                if vector or watch.holding:
                    changes += self._carry_on(watch, vector, now_seconds, step)
            except Exception:
                if not watch.failed:
                    watch.failed = True
                    log.exception("%s (%s) cannot be judged", watch.condition.name, watch.severity)
        self.readings.begin_round()
        return changes

    def restore(
        self,
        name: str,
        severity: str,
        labels: Mapping[str, str],
        value: float,
        *,
        step: int,
        now_seconds: float,
    ) -> Finding | None:
        """Take up a finding from before anything was remembered; None when nothing is so called.

        It lasts for as long as the level may look back, since what made it hold is not known.
        """
        for watch in self._watches:
            if (watch.condition.name, watch.severity) == (name, severity):
                holding = _Holding(now_seconds, step, value)
                holding.keep_seconds = watch.keep_seconds + watch.reach_seconds
                holding.found = watch.finding(labels, holding)
                watch.holding[tuple(labels.get(label, "") for label in watch.kept)] = holding
                return holding.found
        return None

    def _watch(self, interpreter: Interpreter, condition: Condition, level: Level) -> _Watch:
        interpreted = interpreter.interpret(level.when)
        count = interpreted.evaluate if level.counts_steps else None
        if level.counted is not None:
            count = interpreter.interpret(level.counted).evaluate
        seconds = self._values.seconds
        severity = self._values.severity(condition.name, level.severity) or level.severity
        return _Watch(
            condition,
            level,
            severity.value,
            interpreted.evaluate,
            count,
            interpreted.kept,
            hold_seconds=seconds[level.hold.name] if level.hold else 0.0,
            keep_seconds=seconds[level.keep.name] if level.keep else 0.0,
            reach_seconds=_reach_seconds(level, self._values),
            names=frozenset(metric.prometheus_name for metric in level.metrics),
        )

    def _first_step(self, watch: _Watch, key: Kept, now_seconds: float, step: int) -> int:
        """Return the first step on which a level that holds now did, of those since it was judged.

        It is the last one where time alone has made it hold, and the first of the steps that a
        level counts.
        """
        first = step
        for earlier in sorted(self.readings.moved_steps(watch.names)):
            if 0 < earlier < step:
                value = watch.evaluate(Moment(now_seconds, earlier)).get(key)
                if value is not None and isfinite(value):
                    first = earlier
                    break
        count = watch.count(Moment(now_seconds)).get(key) if watch.count else None
        return first if count is None else min(first, self.readings.first_of(count, step))

    def _carry_on(
        self, watch: _Watch, vector: Vector, now_seconds: float, step: int
    ) -> list[Change]:
        """Carry a level on to now, as Prometheus carries an alert."""
        changes = []
        vector = {key: value for key, value in vector.items() if isfinite(value)}
        for key, value in vector.items():
            holding = watch.holding.get(key)
            if holding is None:
                if len(watch.holding) >= FINDINGS_PER_LEVEL:
                    continue
                first_step = self._first_step(watch, key, now_seconds, step)
                holding = watch.holding[key] = _Holding(now_seconds, first_step, value)
            holding.value, holding.absent_since_seconds = value, None
            holding.keep_seconds = watch.keep_seconds
            if holding.found is None and now_seconds - holding.since_seconds >= watch.hold_seconds:
                labels = dict(zip(watch.kept, key, strict=True))
                holding.found = watch.finding(labels, holding)
                changes.append(Change(True, holding.found))
        for key in [key for key in watch.holding if key not in vector]:
            holding = watch.holding[key]
            if holding.absent_since_seconds is None:
                holding.absent_since_seconds = now_seconds
            absent_seconds = now_seconds - holding.absent_since_seconds
            if holding.found is None or absent_seconds >= holding.keep_seconds:
                del watch.holding[key]
                if holding.found:
                    changes.append(Change(False, holding.found))
        return changes


def _period_seconds(watches: Iterable[tuple[Condition, Level]], values: Values) -> float:
    """Return the shortest time that any level looks back, divided."""
    windows = [values.seconds[window.name] for _, level in watches for window, _ in _ranges(level)]
    return min(windows, default=1.0) / PERIODS_PER_WINDOW


def _reach_seconds(level: Level, values: Values) -> float:
    """Return how far back a level looks."""
    ranges = [(window, *before) for window, before in _ranges(level)]
    return max((sum(values.seconds[d.name] for d in lengths) for lengths in ranges), default=0.0)


def _ranges(level: Level) -> Iterator[tuple[Duration, tuple[Duration, ...]]]:
    """Yield each window that a level looks at, and how long before now it ends."""
    for node in walk(level.when):
        if isinstance(node, Count):
            yield node.window, node.before
        elif isinstance(node, Series) and node.over:
            yield node.over[1], node.before
