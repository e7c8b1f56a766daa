"""Judges the conditions of one run after each step, and keeps which are active."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.detector.detector import Detector, Finding
from mp_agent.alerting.detector.readings import Key, KnownValue, Labels, Reading
from mp_agent.alerting.values import Severity, Values
from mp_agent.catalog.metric import HistogramValue, Kind, Metric, Scope
from mp_agent.catalog.metric import Reading as CatalogReading
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME, METRICS
from mp_agent.errors import FailureLog
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore, labelled
from mp_agent.node.conditions.messages import (
    ConditionNotifier,
    Listener,
    Observation,
    described,
)
from mp_agent.node.series.snapshot_builder import RunExport, samples_of
from mp_agent.records.conditions import (
    ActiveCondition,
    ConditionMemory,
    KnownCondition,
    StoredConditionEvent,
)
from mp_agent.records.views import RunView


class MetricReader:
    """Reads only the metrics that conditions use. `names`: as they are exposed."""

    def __init__(self, names: frozenset[str], thresholds: Mapping[str, float]) -> None:
        self._thresholds = thresholds
        metrics = [metric for metric in METRICS if _exposed(metric) & names]
        self._counted = [
            ((metric.prometheus_name, ()), metric)
            for metric in metrics
            if _is_plain(metric) and not metric.read
        ]
        self._confirmed = [own for own in self._counted if own[1].evidence_step]
        of_run = [metric for metric in metrics if metric.read and metric.scope is Scope.RUN]
        self._read = [_Read(*_named(metric), metric.read) for metric in of_run if metric.read]
        self._gauges = [
            read
            for read, metric in zip(self._read, of_run, strict=True)
            if metric.kind is Kind.GAUGE
        ]
        self._others = [
            (metric, *_named(metric))
            for metric in metrics
            if not _is_plain(metric) and metric not in of_run
        ]
        self._by_name = {
            metric.name: metric
            for metric in metrics
            if metric.count and metric.kind is Kind.COUNTER and metric.scope is Scope.RUN
        }

    def all_series(self, export: RunExport) -> Iterator[Reading]:
        """Yield every series of the metrics, without the label `run` and empty labels."""
        if export.view is not None:
            yield from _values(self._read, export.view)
            for key, metric in self._counted:
                yield key, export.counters.total(metric, ())
        for metric, exposed, names in self._others:
            for sample in samples_of(metric, export, self._thresholds):
                labels = _present(names, sample.labels[1:])
                if isinstance(sample.value, HistogramValue):
                    yield (f"{exposed}_sum", labels), sample.value.sum
                    yield (f"{exposed}_count", labels), float(sample.value.cumulative_counts[-1])
                else:
                    yield (exposed, labels), sample.value

    def evidence_steps(self, counters: CounterStore) -> Mapping[Key, int]:
        """Return of which step a counter is that later steps had to confirm."""
        steps = {key: counters.evidence_step(metric, ()) for key, metric in self._confirmed}
        return {key: step for key, step in steps.items() if step is not None}

    def moved(self, view: RunView, counters: CounterStore) -> Iterator[Reading]:
        """Yield the run's gauges, which do not retain earlier values, and the counters that rose.

        Those that rose since the last call: a condition holds since the step on which one did.
        """
        for name, labels, value in counters.pop_risen():
            if (counted := self._by_name.get(name)) is not None:
                own = _present(counted.label_names[1:], labels)
                yield (counted.prometheus_name, own), value
        yield from _values(self._gauges, view)


class _Read(NamedTuple):
    exposed: str
    names: tuple[str, ...]
    """Of the labels, without the label `run`."""
    read: Callable[[RunView], CatalogReading]


def _values(reads: Iterable[_Read], view: RunView) -> Iterator[Reading]:
    for exposed, names, read in reads:
        for texts, value in labelled(read(view)):
            yield (exposed, _present(names, texts)), float(value)


def _named(metric: Metric) -> tuple[str, tuple[str, ...]]:
    return metric.prometheus_name, metric.label_names[1:]


def _present(names: tuple[str, ...], texts: Iterable[str]) -> Labels:
    """Return labels as the detector knows them; those that a series lacks come last."""
    return tuple((name, text) for name, text in zip(names, texts, strict=False) if text)


def known_before(counters: CounterStore) -> KnownValue:
    """Return the values that counters had when the previous node agent ended.

    Gauges start from their first reading: when they rose is not known.
    """
    totals = {(name, labels): value for name, labels, value in counters.dump()[0]}

    def known_value(name: str, labels: Labels, value: float) -> float | None:
        metric = BY_PROMETHEUS_NAME.get(name)
        if metric is None or metric.count is None:
            return value
        return totals.get((metric.name, _counter_labels(metric, labels)), 0.0)

    return known_value


def _counter_labels(metric: Metric, labels: Labels) -> tuple[str, ...]:
    """Return label values as counters are keyed by: optional labels only if present."""
    found = dict(labels)
    return tuple(
        found.get(name, "")
        for name in metric.label_names[1:]
        if name in found or name not in metric.optional_labels
    )


def _is_plain(metric: Metric) -> bool:
    """Return whether a metric is one series per run."""
    return metric.label_names == Scope.RUN.value and metric.kind is not Kind.HISTOGRAM


def _exposed(metric: Metric) -> frozenset[str]:
    name = metric.prometheus_name
    return frozenset((f"{name}_sum", f"{name}_count") if metric.kind is Kind.HISTOGRAM else (name,))


_Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""Condition, severity, and its labels."""

_WORST_FIRST = [severity.value for severity in Severity]


class ActiveConditions:
    """Holds back a milder severity until the worse ones have ended, as Alertmanager does."""

    def __init__(self, levels: Iterable[tuple[str, str]], memory: ConditionMemory) -> None:
        """Continue an earlier node agent's counts; levels: all (condition, severity) that exist."""
        counts = {(name, severity): count for name, severity, count in memory.fired}
        self.fired = {level: counts.get(level, 0) for level in levels}
        """How often each condition began, by condition and severity."""
        self._known: dict[_Key, KnownCondition] = {}
        self._past = {(one.name, one.severity): one for one in memory.past}

    @property
    def past(self) -> tuple[ActiveCondition, ...]:
        """The last that ended of each condition and severity, of all attempts."""
        return tuple(self._past.values())

    @property
    def active(self) -> tuple[ActiveCondition, ...]:
        """The active conditions, milder severities included, in the order in which they began."""
        return tuple(known.active for known in self._known.values())

    @property
    def memory(self) -> ConditionMemory:
        """State that a successor of this node agent needs."""
        return ConditionMemory(
            fired=[(*level, count) for level, count in self.fired.items() if count],
            known=list(self._known.values()),
            past=list(self._past.values()),
        )

    def restore(self, finding: Finding, known: KnownCondition) -> None:
        """Restore a condition that was active under the previous node agent."""
        self._known[_key(finding)] = known

    def begin(self, finding: Finding, active: ActiveCondition) -> None:
        """Add a condition that has begun."""
        self.fired[finding.condition.name, finding.severity] += 1
        self._known[_key(finding)] = KnownCondition(
            active=active, labels=dict(finding.labels), notified=False
        )

    def known(self, finding: Finding) -> ActiveCondition | None:
        """Return the active condition of a finding; None if it is not active."""
        found = self._known.get(_key(finding))
        return None if found is None else found.active

    def update(self, finding: Finding, active: ActiveCondition) -> None:
        """Replace the text and value of an active condition."""
        self._known[_key(finding)] = replace(self._known[_key(finding)], active=active)

    def explain(self, verdict: str) -> list[ActiveCondition]:
        """Note what a post-mortem found in the critical conditions that lack it; return those."""
        lacking = [
            (key, replace(known.active, postmortem=verdict))
            for key, known in self._known.items()
            if known.active.severity == Severity.CRITICAL.value
            and known.notified
            and known.active.postmortem != verdict
        ]
        for key, active in lacking:
            self._known[key] = replace(self._known[key], active=active)
        return [active for _, active in lacking]

    def end(self, finding: Finding, step: int) -> KnownCondition | None:
        """Remove a condition that has ended, and return it. step: the run's last one."""
        if (known := self._known.pop(_key(finding), None)) is not None:
            active = replace(known.active, ended_step=step)
            self._past[active.name, active.severity] = active
        return known

    def pop_unnotified(self) -> Iterator[ActiveCondition]:
        """Yield active conditions that were not notified yet, unless a worse severity is active."""
        for severity in _WORST_FIRST:
            for key, known in list(self._known.items()):
                if (
                    known.active.severity == severity
                    and not known.notified
                    and not self._is_held_back(known)
                ):
                    self._known[key] = replace(known, notified=True)
                    yield known.active

    def _is_held_back(self, known: KnownCondition) -> bool:
        worse = _WORST_FIRST[: _WORST_FIRST.index(known.active.severity)]
        return any(
            other.name == known.active.name and other.severity in worse for other in self.active
        )


def _key(finding: Finding) -> _Key:
    return finding.condition.name, finding.severity, tuple(finding.labels.items())


PROCESSOR_SHARE = 0.005
"""Share of one processor that judging may take, unless a step has waited for it for long."""
WAIT_SECONDS_AT_MOST = 0.5
"""Of a step for being judged, besides the time between two polls."""
JUDGE_INTERVAL_SECONDS = 1.0
"""Time between two judgements while no step arrives."""


class ConditionTracker:
    """Judges a run on every step, or less often if that would exceed the budget.

    What counters and gauges did on the steps between two judgements counts in the next one.
    """

    def __init__(
        self,
        run_dir: Path,
        values: Values,
        *,
        memory: ConditionMemory,
        earlier: CounterStore | None = None,
        conditions: Iterable[Condition] = CONDITIONS,
    ) -> None:
        """Continue from the state and counters of an earlier node agent, if there was one."""
        self._run_dir = run_dir
        self._values = values
        known_value = None if earlier is None else known_before(earlier)
        self._detector = Detector(conditions, values, known_value=known_value)
        self._reader = MetricReader(self._detector.readings.names, values.limits)
        self._interval_seconds = min(JUDGE_INTERVAL_SECONDS, self._detector.readings.period_seconds)
        self._remembered: ConditionMemory | None = memory
        self._active = ActiveConditions(self._detector.levels, memory)
        self._failures = FailureLog()
        self._notifier = ConditionNotifier(run_dir, self._failures)
        self._view: RunView | None = None
        self._unjudged = self._changed = False
        self._judged_seconds = float("-inf")
        self._pause_seconds = self._resume_seconds = 0.0

    @property
    def active(self) -> tuple[ActiveCondition, ...]:
        """The active conditions, milder severities included, in the order in which they began."""
        return self._active.active

    @property
    def past(self) -> tuple[ActiveCondition, ...]:
        """The last that ended of each condition and severity, of all attempts."""
        return self._active.past

    @property
    def fired(self) -> dict[tuple[str, str], int]:
        """How often each condition began, by condition and severity."""
        return self._active.fired

    @property
    def memory(self) -> ConditionMemory:
        """State that a successor of this node agent needs."""
        return self._active.memory if self._remembered is None else self._remembered

    @property
    def listeners(self) -> list[Listener]:
        """Called with every event; what one raises is logged."""
        return self._notifier.listeners

    @property
    def named_ranks(self) -> frozenset[int]:
        """The ranks that conditions name which hold now; on every node, by the root's events."""
        return self._notifier.named_ranks

    def recent_news(self, now_seconds: float) -> bytes:
        """Return the recent events for other nodes; b"" if there are none."""
        return self._notifier.recent_news(now_seconds)

    def adopt_from_root(self, content: bytes) -> None:
        """Publish the root's events to the ranks of this node; b"" means none."""
        self._notifier.adopt_from_root(content)

    def publish_again(self) -> None:
        """Publish events to the ranks of this node that could not be written before."""
        self._notifier.publish_again()

    def explain(self, verdict: str, now_seconds: float) -> None:
        """Note in the critical conditions what a post-mortem found, and notify of it."""
        if self._view is None or not (explained := self._active.explain(verdict)):
            return
        observation = Observation(self._view, now_seconds, time.time())
        for active in explained:
            self._notify("explained", active, observation)
        self._changed = True
        self._notifier.publish()

    def after_step(
        self, account: Accumulator, now_seconds: float, read: Callable[[], RunExport]
    ) -> None:
        """Judge the run after a closed step, budget permitting; read: returns the run's export."""
        self._unjudged = True
        if perf_counter() >= self._resume_seconds:
            self._judge(now_seconds, read)
        elif self._view is not None:
            view = account.view(self._view, time.time())
            moved = self._reader.moved(view, account.counters)
            step = view.latest.step.step if view.latest.step else 0
            evidence = self._reader.evidence_steps(account.counters)
            self._detector.readings.update_some(moved, now_seconds, step, evidence)

    def tick(self, now_seconds: float, read: Callable[[], RunExport]) -> bool:
        """Judge steps that were skipped, soon after, and regularly while no step arrives.

        Returns whether a condition has begun or ended since the last call.
        """
        due_seconds = self._interval_seconds
        if self._unjudged:
            due_seconds = min(due_seconds, self._pause_seconds, WAIT_SECONDS_AT_MOST)
        if now_seconds - self._judged_seconds >= due_seconds:
            self._judge(now_seconds, read)
        changed, self._changed = self._changed, False
        return changed

    def _judge(self, now_seconds: float, read: Callable[[], RunExport]) -> None:
        """Judge; log what it raises, and pause so that the budget is kept."""
        begun = perf_counter()
        self._unjudged, self._judged_seconds = False, now_seconds
        try:
            export = read()
            if export.view is not None:
                self._judge_run(export, export.view, now_seconds)
        except Exception:
            self._failures.note("the conditions of run %s cannot be judged", self._run_dir.name)
        ended = perf_counter()
        self._pause_seconds = (ended - begun) * (1 / PROCESSOR_SHARE - 1)
        self._resume_seconds = ended + self._pause_seconds

    def _judge_run(self, export: RunExport, view: RunView, now_seconds: float) -> None:
        self._view = view
        observation = Observation(view, now_seconds, time.time())
        series = self._reader.all_series(export)
        evidence = self._reader.evidence_steps(export.counters)
        self._detector.readings.update(series, now_seconds, observation.step, evidence)
        if self._remembered is not None:
            self._restore(self._remembered, now_seconds)
            self._remembered = None
        changes = self._detector.evaluate(now_seconds, observation.step)
        self._refresh(observation)
        if not changes:
            return
        self._changed = True
        step = observation.step
        over = [self._active.end(change.finding, step) for change in changes if not change.firing]
        for change in changes:
            if change.firing:
                active = self._described(change.finding, observation)
                self._active.begin(change.finding, active)
        for known in over:
            if known is not None and known.notified:
                self._notify("resolved", known.active, observation)
        for active in self._active.pop_unnotified():
            self._notify("firing", active, observation)
        self._notifier.publish()

    def _refresh(self, observation: Observation) -> None:
        """Update texts and values of the active conditions."""
        for finding in self._detector.findings:
            known = self._active.known(finding)
            if known is not None and known.value != finding.value:
                active = self._described(finding, observation)
                updated = replace(known, summary=active.summary, description=active.description)
                self._active.update(finding, replace(updated, value=active.value))

    def _restore(self, memory: ConditionMemory, now_seconds: float) -> None:
        """Restore the conditions that were active under the previous node agent."""
        for known in memory.known:
            active = known.active
            found = self._detector.restore(
                active.name,
                active.severity,
                known.labels,
                active.value,
                step=active.since_step,
                now_seconds=now_seconds,
            )
            if found is not None:
                self._active.restore(found, known)

    def _described(self, finding: Finding, observation: Observation) -> ActiveCondition:
        active = {
            found.condition.name: found.since_step
            for found in sorted(self._detector.findings, key=lambda found: -found.since_step)
        }
        return described(finding, observation, self._values, self._series_labels, active)

    def _series_labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for labels, _ in self._detector.readings.standing(name)]

    def _notify(self, state: str, active: ActiveCondition, observation: Observation) -> None:
        event = StoredConditionEvent(
            state=state,
            condition=active,
            step=observation.step,
            time_unix_seconds=observation.time_unix_seconds,
        )
        self._notifier.notify(event, observation.now_seconds)
