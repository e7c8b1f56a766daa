"""The planted faults whose pages are kept, and the alerts that the rules make of them.

Everything is real but the clock: rings, merge, detectors, catalog, rules, promtool's expansion of
the annotations, Alertmanager's grouping, muting and templates.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import values_in_force
from tests.alerting.noise.events import Scenario
from tests.alerting.noise.faults import FAULTS
from tests.alerting.noise.judge import judge, series_input
from tests.alerting.noise.replay import SCRAPE_SECONDS, Recording, record
from tests.alerting.promtool import unit_test

NAMES = (
    "explosion",
    "destroyed",
    "crept-back",
    "nothing-trained",
    "left-out",
    "vanishing",
    "nan-update",
    "nan-loss-of-a-rank",
    "collapse",
    "hang",
    "laggard",
    "exception",
    "killed",
    "crash-loop",
    "diverged",
)
"""Fifteen of the faults that wake people."""

_GATHERED_SECONDS = 600
"""After the first critical alert: what follows from the fault has fired by then as well."""
_ALERT = re.compile(r"Labels:(\{.*\})\n\s*Annotations:(\{.*\})")
_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, slots=True)
class Fired:
    """An alert as Prometheus sends it."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    since_seconds: float
    """When it fired first, counted from the run's beginning."""


@dataclass(frozen=True, slots=True)
class Incident:
    """The alerts of one fault: at the first critical one, and ten minutes after it."""

    name: str
    what: str
    at_once: tuple[Fired, ...]
    gathered: tuple[Fired, ...]


def scenarios(names: Sequence[str] = NAMES) -> list[Scenario]:
    """Return the faults by name."""
    by_name = {scenario.name: scenario for scenario in FAULTS}
    return [by_name[name] for name in names]


def incidents(names: Sequence[str], promtool: Path, directory: Path) -> list[Incident]:
    """Return what fires on the faults, with the texts that people get."""
    recordings = [
        record(scenario, directory / scenario.name, detectors=True) for scenario in scenarios(names)
    ]
    verdicts = judge(recordings, promtool, directory)
    recorded = {recording.scenario.name: recording for recording in recordings}
    return [
        _incident(recorded[verdict.scenario.name], verdict.fired, promtool, directory)
        for verdict in sorted(verdicts, key=lambda v: names.index(v.scenario.name))
    ]


def _incident(
    recording: Recording,
    fired: Mapping[str, Mapping[str, float]],
    promtool: Path,
    directory: Path,
) -> Incident:
    first = min(times["critical"] for times in fired.values() if "critical" in times)
    last = min(first + _GATHERED_SECONDS, (recording.scrapes - 1) * SCRAPE_SECONDS)
    scenario = recording.scenario
    at_once, gathered = (
        tuple(_alerts_at(recording, seconds, fired, promtool, directory))
        for seconds in (first, last)
    )
    return Incident(scenario.name, scenario.what, at_once, gathered)


def _alerts_at(
    recording: Recording,
    seconds: float,
    fired: Mapping[str, Mapping[str, float]],
    promtool: Path,
    directory: Path,
) -> Iterator[Fired]:
    """Yield the alerts that fire at a moment; promtool shows what a test did not expect."""
    (directory / RULES_FILE).write_text(
        render_rules(values_in_force(), runbook_base="https://runbooks.example/")
    )
    tests = [
        f"  - eval_time: {seconds:.0f}s\n    alertname: {name}\n    exp_alerts: []\n"
        for name in (condition.name for condition in CONDITIONS)
        if name in fired
    ]
    file = directory / f"{recording.scenario.name}-{seconds:.0f}.test.yaml"
    file.write_text(
        f"rule_files: [{RULES_FILE}]\nevaluation_interval: {SCRAPE_SECONDS}s\ntests:\n"
        f"- interval: {SCRAPE_SECONDS}s\n  input_series:\n"
        + "".join(series_input(recording))
        + "  alert_rule_test:\n"
        + "".join(tests)
    )
    done = unit_test(promtool, file)
    for labels_text, annotations_text in _ALERT.findall(done.stdout + done.stderr):
        labels, annotations = _pairs(labels_text), _pairs(annotations_text)
        begin = fired[labels["alertname"]][labels["severity"]]
        yield Fired(labels, annotations, begin)


def _pairs(text: str) -> dict[str, str]:
    return {name: json.loads(value) for name, value in _PAIR.findall(text)}
