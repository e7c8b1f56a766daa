"""Judges the conditions of one run after each step, within a processor time budget."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.detector.detector import Detector, Finding
from mp_agent.alerting.values import Values
from mp_agent.node.accounting.accumulator import Accumulator
from mp_agent.node.accounting.counters import CounterStore
from mp_agent.node.conditions.active import ActiveConditions
from mp_agent.node.conditions.messages import Observation, described
from mp_agent.node.conditions.metric_reader import MetricReader, known_before
from mp_agent.node.conditions.notifier import ConditionNotifier, FailureLog, Listener
from mp_agent.node.series.snapshot_builder import RunExport
from mp_agent.records.conditions import ActiveCondition, ConditionMemory, StoredConditionEvent
from mp_agent.records.views import RunView

__all__ = ["JUDGE_INTERVAL_SECONDS", "PROCESSOR_SHARE", "ConditionTracker", "Listener"]

PROCESSOR_SHARE = 0.05
"""Share of one processor that judging may take, however fast the steps come."""
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
        self._resume_seconds = 0.0

    @property
    def active(self) -> tuple[ActiveCondition, ...]:
        """The active conditions, milder severities included, in the order in which they began."""
        return self._active.active

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

    def recent_news(self, now_seconds: float) -> bytes:
        """Return the recent events for other nodes; b"" if there are none."""
        return self._notifier.recent_news(now_seconds)

    def adopt_from_root(self, content: bytes) -> None:
        """Publish the root's events to the ranks of this node; b"" means none."""
        self._notifier.adopt_from_root(content)

    def after_step(
        self, account: Accumulator, now_seconds: float, read: Callable[[], RunExport]
    ) -> None:
        """Judge the run after a closed step, budget permitting; read: returns the run's export."""
        self._unjudged = True
        if perf_counter() >= self._resume_seconds:
            self._judge(now_seconds, read)
        elif self._view is not None:
            health = account.health(self._view.health.laggards)
            view = replace(self._view, **account.view_of_step(), health=health)
            moved = self._reader.moved(view, account.counters)
            step = view.last.step if view.last else 0
            evidence = self._reader.evidence_steps(account.counters)
            self._detector.readings.update_some(moved, now_seconds, step, evidence)

    def tick(self, now_seconds: float, read: Callable[[], RunExport]) -> bool:
        """Judge steps that were skipped, and regularly while no step arrives.

        Returns whether a condition has begun or ended since the last call.
        """
        due = now_seconds - self._judged_seconds >= self._interval_seconds
        if due or self._unjudged:
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
        self._resume_seconds = ended + (ended - begun) * (1 / PROCESSOR_SHARE - 1)

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
        over = [self._active.end(change.finding) for change in changes if not change.firing]
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
