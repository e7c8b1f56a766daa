"""Examples and other series, minute by minute, through the detectors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.descriptions import plain_text
from mp_agent.alerting.detector.detector import Detector, Finding
from mp_agent.alerting.detector.readings import Reading
from mp_agent.alerting.promql import label_text
from mp_agent.alerting.values import Values
from tests.alerting.examples.example import RUN, TARGET, Example, Value
from tests.alerting.promtool import _samples, _tracks

MINUTE = 60.0

Tracks = Mapping[tuple[str, tuple[tuple[str, str], ...]], Sequence[Value]]


@dataclass(frozen=True)
class Alert:
    """An alert as Prometheus would show it, without what is equal for all of an example."""

    name: str
    severity: str
    labels: tuple[tuple[str, str], ...]
    description: str


@dataclass
class Replayed:
    """What was firing at each minute, and what fired at all."""

    firing: list[set[Alert]] = field(default_factory=list)

    @property
    def ever(self) -> set[tuple[str, str]]:
        return {(alert.name, alert.severity) for minute in self.firing for alert in minute}

    def at(self, minute: int, condition: str) -> set[Alert]:
        return {alert for alert in self.firing[minute] if alert.name == condition}


def expected(condition: Condition, example: Example, values: Values) -> set[Alert]:
    """Return what the detectors must find at the example's moment."""
    if only_scrapes_can_show(example):
        return set()
    labels = {
        name: value
        for name, value in example.labels.items()
        if value and name not in ("namespace", "job", "run")
    }
    return {
        Alert(
            condition.name, severity.value, tuple(sorted(labels.items())), values.fill(description)
        )
        for severity, description in example.fires.items()
    }


def only_scrapes_can_show(example: Example) -> bool:
    """Return whether it is of targets rather than of a run: no node agent sees those."""
    return example.labels.get("run") == ""


def tracks_of(example: Example, values: Values) -> Tracks:
    """Return the example's series as promtool is given them, without the labels of the run."""
    found = {}
    for track in _tracks(example):
        labels = {name: label_text(value) for name, value in track.labels.items()}
        key = tuple(sorted({"instance": TARGET["instance"], **labels}.items()))
        found[track.name, key] = _samples(track, example, values)
    return found


def replay(
    tracks: Tracks, minutes: int, values: Values, conditions: Iterable[Condition] = CONDITIONS
) -> Replayed:
    """Take one reading per minute, from minute 0 to `minutes`, and judge after each."""
    detector = Detector(conditions, values)
    replayed = Replayed()
    shown = {key: _shown(samples, minutes) for key, samples in tracks.items()}
    for minute in range(minutes + 1):
        now_seconds = minute * MINUTE * values.time_scale
        detector.readings.update(_readings(shown, minute), now_seconds)
        detector.evaluate(now_seconds)
        replayed.firing.append({_alert(detector, found, values) for found in detector.findings})
    return replayed


def _readings(tracks: Tracks, minute: int) -> list[Reading]:
    return [
        (key, float(value))
        for key, samples in tracks.items()
        if isinstance(value := samples[minute], (int, float))
    ]


def _shown(samples: Sequence[Value], minutes: int) -> list[Value]:
    """Return samples; one that is missing without the series having ended is the one before it."""
    shown: list[Value] = []
    for value in islice(chain(samples, repeat(None)), minutes + 1):
        shown.append(shown[-1] if value is None and shown else value)
    return shown


def _alert(detector: Detector, finding: Finding, values: Values) -> Alert:
    labels = {name: value for name, value in finding.labels.items() if value}
    target = {"namespace": TARGET["namespace"], "job": TARGET["job"], "run": RUN}

    def lookup(metric: str) -> list[dict[str, str]]:
        return [dict(labels) for labels, _ in detector.readings.standing(metric)]

    parts = finding.level.parts
    description = plain_text(parts, values, {**target, **labels}, finding.value, lookup)
    name, severity = finding.condition.name, finding.severity
    return Alert(name, severity, tuple(sorted(labels.items())), description)
