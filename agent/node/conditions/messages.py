"""Writes condition events, and passes them on: log, listeners, ranks."""

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mp_agent.alerting.condition import Level
from mp_agent.alerting.descriptions import InfoMark, Lookup, plain_text
from mp_agent.alerting.detector.detector import Finding
from mp_agent.alerting.first_line import NAN_UPDATES, headline
from mp_agent.alerting.remedies import fitting
from mp_agent.alerting.values import Values
from mp_agent.catalog.metrics import run
from mp_agent.errors import FailureLog, ReportError
from mp_agent.records.conditions import ActiveCondition, StoredConditionEvent
from mp_agent.records.views import RunView
from mp_agent.ring.run_files import (
    ConditionNews,
    decode_news,
    encode_news,
    read_conditions,
    write_conditions,
)

log = logging.getLogger("mp_agent.node")

_PLAIN = re.compile(r"[^\s\"'=]*")
_LOG_LEVELS = {"critical": logging.CRITICAL, "warning": logging.WARNING, "info": logging.INFO}


class Observation(NamedTuple):
    """The run's state when conditions were judged, with monotonic and wall-clock time."""

    view: RunView
    now_seconds: float
    time_unix_seconds: float

    @property
    def step(self) -> int:
        """The run's last step; 0 before the first."""
        return self.view.latest.step.step if self.view.latest.step else 0


def described(
    finding: Finding,
    observation: Observation,
    values: Values,
    lookup: Lookup,
    active: Mapping[str, int],
) -> ActiveCondition:
    """Return a finding as an active condition.

    lookup: labels of the run's info metrics. active: all conditions that the run has now,
    with their first steps.
    """
    condition, level = finding.condition, finding.level
    ago_seconds = observation.now_seconds - finding.since_seconds
    labels = {"run": observation.view.identity.run, **finding.labels}
    place, since_step = _place(finding, observation.view, labels, lookup)
    return ActiveCondition(
        name=condition.name,
        severity=finding.severity,
        run=observation.view.identity.run,
        since_step=since_step,
        since_unix_seconds=observation.time_unix_seconds - ago_seconds,
        value=finding.value,
        summary=_first_line(finding, since_step, labels, active),
        description=plain_text(level.parts, values, labels, finding.value, lookup),
        remedy=" ".join(fitting(condition.remedies, lookup, since_step=since_step)),
        rank=place["rank"],
        layer=place["layer"],
        phase=place["phase"],
    )


def _first_line(
    finding: Finding, since_step: int, labels: Mapping[str, str], active: Mapping[str, int]
) -> str:
    condition, triage = finding.condition, finding.level.triage
    if triage is None:
        return condition.summary
    return headline(
        condition.summary,
        triage,
        since_step=since_step,
        labels=labels,
        causes=condition.follows_from,
        active=active,
    )


def log_event(event: StoredConditionEvent) -> None:
    """Log one line of `name=value` pairs; values with spaces are quoted."""
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
        "summary": active.summary,
        "description": active.description,
        "remedy": active.remedy,
        **({"postmortem": active.postmortem} if active.postmortem else {}),
    }
    level = logging.INFO if event.state == "resolved" else _LOG_LEVELS[active.severity]
    log.log(level, " ".join(f"{name}={_logged(value)}" for name, value in fields.items()))


def _place(
    finding: Finding, view: RunView, labels: Mapping[str, str], lookup: Lookup
) -> tuple[dict[str, str], int]:
    """Return rank, layer and phase, as far as they are known, and the first step.

    Alerts of one incident have its step. That of updates has the step of the first of them: before
    it, weights are intact.
    """
    first = view.first_nonfinite
    if first is not None and run.FIRST_NONFINITE.prometheus_name in _named(finding.level):
        place = {"rank": first.rank, "layer": first.layer, "phase": first.phase}
        updated = finding.condition.name == NAN_UPDATES
        return place, finding.since_step if updated else min(first.step, finding.since_step)
    place = {name: labels.get(name, "") for name in ("rank", "layer", "phase")}
    place["rank"] = place["rank"] or _only_rank(finding.level, lookup)
    return place, int(labels.get("step", finding.since_step))


def _only_rank(level: Level, lookup: Lookup) -> str:
    """Return the rank that the description names, if it is one alone."""
    named = [series for metric in _named(level) for series in lookup(metric) if "rank" in series]
    return named[0]["rank"] if len(named) == 1 else ""


def _named(level: Level) -> Iterable[str]:
    """Return the info metrics that a level's description refers to."""
    return {part.metric for part in level.parts if isinstance(part, InfoMark)}


def _logged(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


NEWS_SECONDS = 60.0
"""Time for which events are sent to other nodes, each of which reports every few seconds."""

Listener = Callable[[StoredConditionEvent], None]


class ConditionNotifier:
    """Sends the events of one run, in order."""

    def __init__(self, run_dir: Path, failures: FailureLog) -> None:
        """Continue the file for the ranks that an earlier node agent wrote, if there is one."""
        self._run_dir = run_dir
        self._failures = failures
        self._news = read_conditions(run_dir) or ConditionNews(epoch=secrets.token_hex(8))
        self._notified_seconds = float("-inf")
        self._adopted = b""
        self._refusal = ""
        """Why the events could not be written last time."""
        self.listeners: list[Listener] = []
        """Called with every event; what one raises is logged."""

    def notify(self, event: StoredConditionEvent, now_seconds: float) -> None:
        """Log an event and call the listeners; `publish` sends it to the ranks."""
        self._notified_seconds = now_seconds
        log_event(event)
        self._news = self._news.with_event(event)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                self._failures.note("%r failed on a condition", listener)

    def publish(self) -> None:
        """Write the events to the file that the ranks of this node read."""
        try:
            write_conditions(self._run_dir, self._news)
        except OSError as error:
            if str(error) != self._refusal:
                self._refusal = str(error)
                log.warning("conditions cannot be sent to the ranks yet: %s", error)
        else:
            self._refusal = ""

    def publish_again(self) -> None:
        """Write the events if the last attempt failed."""
        if self._refusal:
            self.publish()

    def recent_news(self, now_seconds: float) -> bytes:
        """Return the last events for other nodes; b"" once they are older than `NEWS_SECONDS`."""
        if now_seconds - self._notified_seconds > NEWS_SECONDS:
            return b""
        return encode_news(self._news)

    @property
    def named_ranks(self) -> frozenset[int]:
        """The ranks that conditions name which hold now, as far as the last events say."""
        holding: set[tuple[str, str, str]] = set()
        for event in self._news.after(0):
            condition = event.condition
            named = (condition.name, condition.severity, condition.rank)
            if event.state == "resolved":
                holding.discard(named)
            else:
                holding.add(named)
        return frozenset(int(rank) for _, _, rank in holding if rank.isdecimal())

    def adopt_from_root(self, content: bytes) -> None:
        """Publish the root's events to the ranks of this node; b"" means none."""
        if not content or content == self._adopted:
            return
        self._adopted = content
        try:
            self._news = decode_news(content)
        except ReportError:
            message = "the root sent conditions that cannot be decoded: %s"
            self._failures.note(message, content[:100])
        else:
            self.publish()
