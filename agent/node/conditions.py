"""The conditions of one run from step to step: who has begun, who is over, and who hears of it."""

import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.descriptions import InfoMark, plain_text
from mp_agent.alerting.detector.detector import Detector, Finding
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.values import Values
from mp_agent.errors import ReportError
from mp_agent.node.accumulate import Progress
from mp_agent.node.counters import CounterBook
from mp_agent.node.readings import MetricReader, known_before
from mp_agent.node.snapshot_builder import RunExport
from mp_agent.records.conditions import (
    ActiveCondition,
    ConditionEvent,
    ConditionMemory,
    KnownCondition,
)
from mp_agent.records.merged import RunView
from mp_agent.ring.conditions_file import (
    ConditionNews,
    decode_news,
    encode_news,
    read_conditions,
    write_conditions,
)

log = logging.getLogger("mp_agent.node")

PROCESSOR_SHARE = 0.05
"""Of one processor: how much judging may take, however fast the steps come."""
LOOK_INTERVAL_SECONDS = 1.0
"""Time between two judgements where no step comes."""
NEWS_SECONDS = 60.0
"""How long events are told to other nodes, each of which reports every few seconds."""

Listener = Callable[[ConditionEvent], None]
_Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""Condition, severity, and the labels that it keeps."""

_WORST_FIRST = [severity.value for severity in Severity]
_PLAIN = re.compile(r"[^\s\"'=]*")
_LOG_LEVELS = {"critical": logging.CRITICAL, "warning": logging.WARNING, "info": logging.INFO}


class ConditionTracker:
    """Judges a run on every step, or less often where that would cost too much.

    No counted step and no extreme value escapes it then. A milder severity is told of only once
    the worse ones are over, as Alertmanager does it.
    """

    def __init__(
        self,
        run_dir: Path,
        values: Values,
        *,
        memory: ConditionMemory,
        earlier: CounterBook | None = None,
        conditions: Iterable[Condition] = CONDITIONS,
    ) -> None:
        """Go on with what an earlier node agent remembered and had counted, if there was one."""
        self._run_dir = run_dir
        self._values = values
        known_value = None if earlier is None else known_before(earlier)
        self._detector = Detector(conditions, values, known_value=known_value)
        self._reader = MetricReader(self._detector.readings.names, values.limits)
        self._interval_seconds = min(LOOK_INTERVAL_SECONDS, self._detector.readings.period_seconds)
        self._remembered: ConditionMemory | None = memory
        counts = {(name, severity): count for name, severity, count in memory.fired}
        self.fired = {level: counts.get(level, 0) for level in self._detector.levels}
        """How often each condition began, by condition and severity."""
        self._known: dict[_Key, KnownCondition] = {}
        self._view: RunView | None = None
        self._unjudged = self._changed = False
        self._judged_seconds = float("-inf")
        self._rests_until = 0.0
        self._told_seconds = float("-inf")
        self._taken_over = b""
        self._news = read_conditions(run_dir) or ConditionNews(epoch=secrets.token_hex(8))
        self._failures: set[str] = set()
        self.listeners: list[Listener] = []
        """They hear of every event that is told; what one raises is logged."""

    @property
    def active(self) -> tuple[ActiveCondition, ...]:
        """The conditions in force, milder severities included, in the order in which they began."""
        return tuple(known.active for known in self._known.values())

    @property
    def memory(self) -> ConditionMemory:
        """What a later node agent needs to go on."""
        if self._remembered is not None:
            return self._remembered
        return ConditionMemory(
            fired=[(*level, count) for level, count in self.fired.items() if count],
            known=list(self._known.values()),
        )

    def recent_news(self, now_seconds: float) -> bytes:
        """Return the last events for the ranks of other nodes; b"" once they must all know."""
        if now_seconds - self._told_seconds > NEWS_SECONDS:
            return b""
        return encode_news(self._news)

    def take_over(self, content: bytes) -> None:
        """Tell the ranks of this node what the root's agent says; b"" says nothing."""
        if not content or content == self._taken_over:
            return
        self._taken_over = content
        try:
            self._news = decode_news(content)
        except ReportError:
            self._log_failure("the root told of conditions that cannot be read: %s", content[:100])
        else:
            self._publish()

    def after_step(
        self, progress: Progress, now_seconds: float, read: Callable[[], RunExport]
    ) -> None:
        """Take a closed step in; read: what the run shows after it."""
        self._unjudged = True
        if perf_counter() >= self._rests_until:
            self._judge(now_seconds, read)
        elif self._view is not None:
            view = _after(self._view, progress)
            self._detector.readings.take_some(self._reader.gauges(view), now_seconds)

    def tick(self, now_seconds: float, read: Callable[[], RunExport]) -> bool:
        """Judge what is left to judge, and now and then although nothing came.

        Returns whether any condition has begun or ended since this was last called.
        """
        due = now_seconds - self._judged_seconds >= self._interval_seconds
        if due or self._unjudged:
            self._judge(now_seconds, read)
        changed, self._changed = self._changed, False
        return changed

    def _judge(self, now_seconds: float, read: Callable[[], RunExport]) -> None:
        begun = perf_counter()
        self._unjudged, self._judged_seconds = False, now_seconds
        try:
            export = read()
            if export.view is not None:
                self._judge_run(export, export.view, now_seconds)
        except Exception:
            self._log_failure("the conditions of run %s cannot be judged", self._run_dir.name)
        ended = perf_counter()
        self._rests_until = ended + (ended - begun) * (1 / PROCESSOR_SHARE - 1)

    def _judge_run(self, export: RunExport, view: RunView, now_seconds: float) -> None:
        self._view = view
        self._detector.readings.take(self._reader.everything(export), now_seconds)
        if self._remembered is not None:
            self._take_up(self._remembered, now_seconds)
            self._remembered = None
        moment = _Moment(view, now_seconds, time.time())
        changes = self._detector.evaluate(now_seconds, moment.step)
        if not changes:
            return
        self._changed, self._told_seconds = True, now_seconds
        over = [self._end(change.finding) for change in changes if not change.firing]
        for change in changes:
            if change.firing:
                self._begin(change.finding, moment)
        for known in over:
            if known is not None and known.told:
                self._tell("resolved", known.active, moment)
        self._tell_unmuted(moment)
        self._publish()

    def _take_up(self, memory: ConditionMemory, now_seconds: float) -> None:
        """Go on with the conditions that were in force under the node agent before this one."""
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
                self._known[_key(found)] = known

    def _begin(self, finding: Finding, moment: "_Moment") -> None:
        self.fired[finding.condition.name, finding.severity] += 1
        self._known[_key(finding)] = KnownCondition(
            active=self._active(finding, moment), labels=dict(finding.labels), told=False
        )

    def _end(self, finding: Finding) -> KnownCondition | None:
        return self._known.pop(_key(finding), None)

    def _active(self, finding: Finding, moment: "_Moment") -> ActiveCondition:
        condition, level = finding.condition, finding.level
        ago_seconds = moment.now_seconds - finding.since_seconds
        labels = {"run": moment.view.identity.run, **finding.labels}
        named = {name: labels.get(name, "") for name in ("rank", "layer", "phase")}
        since_step = finding.since_step
        first = moment.view.first_nonfinite
        if first is not None and metrics.FIRST_NONFINITE.prometheus_name in _named_metrics(level):
            named = {"rank": first.rank, "layer": first.layer, "phase": first.phase}
            since_step = first.step
        return ActiveCondition(
            name=condition.name,
            severity=finding.severity,
            run=moment.view.identity.run,
            since_step=since_step,
            since_unix_seconds=moment.time_unix_seconds - ago_seconds,
            value=finding.value,
            summary=condition.summary,
            description=plain_text(
                level.parts, self._values, labels, finding.value, self._series_labels
            ),
            remedy=" ".join(condition.remedies),
            **named,
        )

    def _series_labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for labels, _ in self._detector.readings.standing(name)]

    def _tell_unmuted(self, moment: "_Moment") -> None:
        """Tell of what is in force and was not told yet, unless a worse severity of it is."""
        for severity in _WORST_FIRST:
            for key, known in list(self._known.items()):
                if known.active.severity == severity and not known.told and not self._muted(known):
                    self._known[key] = replace(known, told=True)
                    self._tell("firing", known.active, moment)

    def _muted(self, known: KnownCondition) -> bool:
        worse = _WORST_FIRST[: _WORST_FIRST.index(known.active.severity)]
        return any(
            other.name == known.active.name and other.severity in worse for other in self.active
        )

    def _tell(self, state: str, active: ActiveCondition, moment: "_Moment") -> None:
        event = ConditionEvent(
            state=state,
            condition=active,
            step=moment.step,
            time_unix_seconds=moment.time_unix_seconds,
        )
        log_event(event)
        self._news = self._news.with_event(event)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                self._log_failure("%r failed on a condition", listener)

    def _publish(self) -> None:
        try:
            write_conditions(self._run_dir, self._news)
        except OSError as error:
            self._log_failure("conditions cannot be told to the ranks: %s", error.strerror)

    def _log_failure(self, message: str, subject: object) -> None:
        """Log what is being handled, the first time that it happens."""
        if message not in self._failures:
            self._failures.add(message)
            log.exception(message, subject)


class _Moment(NamedTuple):
    """When something was found, by the clock of the loop and by the calendar, and in what run."""

    view: RunView
    now_seconds: float
    time_unix_seconds: float

    @property
    def step(self) -> int:
        """The run's last step; 0 before the first."""
        return self.view.last.step if self.view.last else 0


def log_event(event: ConditionEvent) -> None:
    """Write one line of `name=value` pairs; values with spaces are quoted."""
    active = event.condition
    fields = {
        "condition": active.name,
        "state": event.state,
        "severity": active.severity,
        "run": active.run,
        "step": event.step,
        "since_step": active.since_step,
        "rank": active.rank,
        "layer": active.layer,
        "phase": active.phase,
        "value": f"{active.value:.6g}",
        "description": active.description,
        "remedy": active.remedy,
    }
    level = _LOG_LEVELS[active.severity] if event.state == "firing" else logging.INFO
    log.log(level, " ".join(f"{name}={_logged(value)}" for name, value in fields.items()))


def _logged(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _key(finding: Finding) -> _Key:
    return finding.condition.name, finding.severity, tuple(finding.labels.items())


def _named_metrics(level: Level) -> set[str]:
    """Return the info metrics that a level's description names."""
    return {part.metric for part in level.parts if isinstance(part, InfoMark)}


def _after(view: RunView, progress: Progress) -> RunView:
    """Return the view after one more step, as far as gauges change with every step."""
    return replace(
        view,
        last=progress.last,
        judged=progress.judged,
        loss=progress.loss,
        loss_scale=progress.loss_scale,
        loss_scale_consecutive_decreases=progress.loss_scale_consecutive_decreases,
        coverage=progress.last.coverage if progress.last else view.coverage,
    )
