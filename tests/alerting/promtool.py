"""Unit tests of the rules, rendered from the examples of each condition and run by promtool."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.descriptions import Labels
from mp_agent.alerting.durations import prometheus_duration
from mp_agent.alerting.first_line import headline
from mp_agent.alerting.links import OF_CLUSTER
from mp_agent.alerting.promql import label_text, number_text, quoted
from mp_agent.alerting.remedies import Lookup, fitting
from mp_agent.alerting.values import Severity, Values
from mp_agent.alerting.yaml_text import yaml_text
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.metrics import run
from tests.alerting.examples.catalog import examples_of
from tests.alerting.examples.example import RUN, TARGET, Example, Track, Value
from tests.alerting.examples.healthy import clocks, healthy_tracks, same_series
from tests.alerting.examples.routine import ROUTINE

Examples = Sequence[tuple[Condition | None, tuple[Example, ...]]]
"""Conditions with their examples; None: what is routine for all of them."""

ALL_EXAMPLES: Examples = (
    *((condition, examples_of(condition).all) for condition in CONDITIONS),
    (None, ROUTINE),
)

_MINUTE = 60.0
_FIRED = 'count by (alertname, severity) (count_over_time(ALERTS{alertstate="firing"}[%s]))'


def render_tests(
    values: Values,
    rules_file: str,
    *,
    examples: Examples = ALL_EXAMPLES,
    heading: str,
    runbook_base: str = "",
    dashboard_base: str = "",
) -> str:
    """Return the test file for `rules_file`, which was rendered with the same arguments."""
    bases = (runbook_base, dashboard_base)
    tests = [
        _test(condition, example, values, bases)
        for condition, its_examples in examples
        for example in its_examples
    ]
    document = {
        "rule_files": [rules_file],
        "evaluation_interval": _minutes(1, values),
        "tests": tests,
    }
    return yaml_text(document, heading, compact=True)


def _test(
    condition: Condition | None, example: Example, values: Values, bases: tuple[str, str]
) -> dict[str, Any]:
    verb = "fires on" if example.fires else "is quiet on"
    title = f"{condition.name} {verb} {example.title}" if condition else example.title
    return {
        "name": title,
        "interval": _minutes(1, values),
        "input_series": [
            {"series": _series(track), "values": notation(_samples(track, example, values))}
            for track in _tracks(example)
        ],
        "promql_expr_test": [_whatever_fired(condition, example, values)],
        **_moments_test(condition, example, values, bases),
    }


def _moments_test(
    condition: Condition | None, example: Example, values: Values, bases: tuple[str, str]
) -> dict[str, Any]:
    if condition is None:
        return {}
    return {"alert_rule_test": [*_moments(condition, example, values, bases)]}


def _tracks(example: Example) -> list[Track]:
    usual = healthy_tracks(example.minutes)
    step, steps = (_in_force(metric, example, usual) for metric in (run.STEP, run.STEPS))
    healthy = (
        track
        for track in (*usual, *clocks(example, step, steps))
        if track.metric not in example.without
        and not any(same_series(track, other) for other in example.tracks)
    )
    return [*healthy, *example.tracks]


def _in_force(metric: Metric, example: Example, usual: Sequence[Track]) -> Track:
    """Return the example's own track of a metric without labels, or else the usual one."""
    (track,) = [track for track in usual if track.metric is metric]
    return next((own for own in example.tracks if same_series(own, track)), track)


def _series(track: Track) -> str:
    of_run = {"run": RUN} if isinstance(track.metric, Metric) else {}
    labels = {**TARGET, **of_run, **track.labels}
    matchers = ",".join(f"{key}={quoted(label_text(labels[key]))}" for key in labels)
    return f"{track.name}{{{matchers}}}"


def _samples(track: Track, example: Example, values: Values) -> tuple[Value, ...]:
    samples = track.over(example.minutes)
    if example.ends is not None and track not in example.tracks:
        samples = (*samples[: example.ends], "stale")
    if not track.is_seconds:
        return samples
    return tuple(s * values.time_scale if isinstance(s, float | int) else s for s in samples)


def notation(samples: tuple[Value, ...]) -> str:
    """Return samples in promtool's notation, repeated ones as `VALUExTIMES`."""
    words: list[str] = []
    repeats: list[int] = []
    for sample in samples:
        word = _word(sample)
        if words and words[-1] == word and word != "stale":
            repeats[-1] += 1
        else:
            words.append(word)
            repeats.append(0)
    pairs = zip(words, repeats, strict=True)
    return " ".join(_repeated(word, repeat) for word, repeat in pairs)


def _repeated(word: str, repeat: int) -> str:
    if word == "_":
        return f"_x{repeat + 1}"
    return f"{word}x{repeat}" if repeat else word


def _word(sample: Value) -> str:
    if sample is None:
        return "_"
    return sample if isinstance(sample, str) else number_text(float(f"{sample:.10g}"))


def _whatever_fired(
    condition: Condition | None, example: Example, values: Values
) -> dict[str, Any]:
    """Ask, at the end, for every alert that ever fired: these, and no others."""
    own = {condition.name: tuple(example.fires)} if condition and example.fires else {}
    expected = {
        name: tuple(filter(None, (values.severity(name, severity) for severity in severities)))
        for name, severities in {**example.also, **own}.items()
    }
    return {
        "expr": _FIRED % _minutes(example.minutes + 1, values),
        "eval_time": _minutes(example.minutes, values),
        "exp_samples": [
            {"labels": f'{{alertname="{name}", severity="{severity.value}"}}', "value": 1}
            for name, severities in expected.items()
            for severity in severities
        ],
    }


def _moments(
    condition: Condition, example: Example, values: Values, bases: tuple[str, str]
) -> Iterator[dict[str, Any]]:
    """Ask at single moments: silence at `not_yet`, and at `at` the alerts, word for word."""
    for minute in example.not_yet:
        yield _moment(condition, minute, values)
    if not example.fires:
        return
    alerts = []
    for level in condition.levels:
        severity = values.severity(condition.name, level.severity)
        if level.severity in example.fires and severity is not None:
            labels = _alert_labels(example)
            annotations = {
                **condition.annotations(level, values, *bases),
                "summary": _first_line(condition, level, example),
                "remedy": " ".join(fitting(condition.remedies, _series_at(example, example.at))),
                "description": values.fill(example.fires[level.severity]),
                **_of_agent(condition, level, runbook_base=bases[0]),
            }
            alerts.append(
                {
                    "exp_labels": {**labels, **level.labels, "severity": severity.value},
                    "exp_annotations": {
                        name: _with_labels(text, labels) for name, text in annotations.items()
                    },
                }
            )
    yield {**_moment(condition, example.at, values), "exp_alerts": alerts}


def _of_agent(condition: Condition, level: Level, *, runbook_base: str) -> dict[str, str]:
    """Return the annotations from the agent's own series, which an example does not have."""
    has_cause = level.triage is not None and condition.follows_from
    is_critical = level.severity is Severity.CRITICAL
    return {
        "step": "",
        "tracker_url": "",
        **({} if runbook_base else {"runbook_url": ""}),
        **({"postmortem_url": ""} if is_critical else {}),
        **({"cause": ""} if has_cause else {}),
    }


def _first_line(condition: Condition, level: Level, example: Example) -> str:
    """Return the first line without a step, which is in the detectors' own series alone."""
    if level.triage is None:
        return condition.summary
    labels = {key: value for key, value in example.labels.items() if value}
    return headline(
        condition.summary, level.triage, since_step=0, labels=labels, causes=(), active={}
    )


def _series_at(example: Example, minute: int) -> Lookup:
    """Return what finds the labels of the series that a metric has at a minute of an example."""

    def lookup(name: str) -> list[Labels]:
        tracks = [track for track in _tracks(example) if track.name == name]
        there = [t for t in tracks if isinstance(t.over(example.minutes)[minute], float | int)]
        return [{k: v for k, v in t.labels.items() if isinstance(v, str)} for t in there]

    return lookup


def _with_labels(url: str, labels: Labels) -> str:
    """Return an address with its templates of labels filled in."""
    for label in ("namespace", "job", "run"):
        template = f"{{{{ $labels.{label} | urlquery }}}}"
        url = url.replace(template, quote_plus(labels.get(label, "")))
    return url.replace(OF_CLUSTER, "")


def _moment(condition: Condition, minute: int, values: Values) -> dict[str, Any]:
    return {"eval_time": _minutes(minute, values), "alertname": condition.name}


def _alert_labels(example: Example) -> dict[str, str]:
    own = {"namespace": TARGET["namespace"], "job": TARGET["job"], "run": RUN, **example.labels}
    return {label: value for label, value in own.items() if value}


def _minutes(count: int, values: Values) -> str:
    return prometheus_duration(count * _MINUTE * values.time_scale)


_ENVIRONMENT = {"GOGC": "400"}
"""Each test has a small database of its own, so that collecting garbage is much of the work."""


def unit_test(promtool: Path, file: Path) -> subprocess.CompletedProcess[str]:
    """Run the unit tests in a file; what fails is printed on both outputs."""
    return subprocess.run(
        [promtool, "test", "rules", file],
        capture_output=True,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
    )


def assert_passes(promtool: Path, file: Path) -> None:
    """Run the unit tests in a file; every one must pass."""
    done = unit_test(promtool, file)
    assert done.returncode == 0, (done.stdout + done.stderr)[:5_000]
