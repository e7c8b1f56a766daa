"""Puts recorded runs through the shipped rules in promtool, all at once, as in a real cluster."""

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path

from mp_agent.alerting.promql import number_text, quoted
from mp_agent.alerting.rules import RULES_FILE
from mp_agent.alerting.values import Severity
from tests.alerting.noise.events import Scenario
from tests.alerting.noise.replay import RULES, SCRAPE_SECONDS, Recording, Series
from tests.alerting.promtool import unit_test

_FIRST_FIRED = (
    "min by (run, alertname, severity) "
    '(min_over_time(timestamp(ALERTS{{alertstate="firing"}})[{seconds}s:{step}s]))'
)
_FOUND = re.compile(r"\{([^{}]*)\} ([-+0-9.Ee]+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LOT = 18
"""Runs that one promtool judges."""
_SEVERITIES = [severity.value for severity in Severity]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run brought: per alert, the time of its first firing at each severity."""

    scenario: Scenario
    fired: Mapping[str, Mapping[str, float]]
    fault_seconds: float | None

    @property
    def worst(self) -> dict[str, str]:
        """Return every alert that fired with its worst severity."""
        return {
            name: min(severities, key=_SEVERITIES.index) for name, severities in self.fired.items()
        }

    @property
    def surprises(self) -> dict[str, str]:
        """Return what fired and is neither expected nor tolerated, or worse than that."""
        known = {**self.scenario.tolerated, **self.scenario.expected}
        return {
            name: worst
            for name, worst in self.worst.items()
            if name not in known or _SEVERITIES.index(worst) < _SEVERITIES.index(known[name])
        }

    @property
    def missed(self) -> dict[str, str]:
        """Return what should have fired, at this worst severity, and did not."""
        return {
            name: severity
            for name, severity in self.scenario.expected.items()
            if self.worst.get(name) != severity
        }

    def seconds_to(self, name: str) -> float:
        """Return the time from the fault to the alert at the severity that is expected."""
        begin = self.fault_seconds or 0.0
        return self.fired[name][self.scenario.expected[name]] - begin


def judge(
    recordings: Sequence[Recording],
    promtool: Path,
    directory: Path,
    *,
    evaluation_seconds: int = SCRAPE_SECONDS,
) -> list[Verdict]:
    """Return what the rules say of each run, two lots at a time, the short ones first.

    promtool refuses a query over too many samples, so a lot holds some of the runs only.
    """
    (directory / RULES_FILE).write_text(RULES)
    ordered = sorted(recordings, key=lambda recording: recording.scrapes)
    lots = [ordered[first : first + _LOT] for first in range(0, len(ordered), _LOT)]

    def judge_lot(lot: Sequence[Recording]) -> list[Verdict]:
        return _judge(lot, promtool, directory, evaluation_seconds)

    with ThreadPoolExecutor(2) as pool:
        return [verdict for verdicts in pool.map(judge_lot, lots) for verdict in verdicts]


def _judge(
    lot: Sequence[Recording], promtool: Path, directory: Path, evaluation_seconds: int
) -> list[Verdict]:
    file = directory / f"{lot[0].scenario.name}.test.yaml"
    file.write_text("".join(_test(lot, evaluation_seconds)))
    # A test that expects nothing fails and prints what was found: promtool's way to print a value.
    done = unit_test(promtool, file)
    output = done.stdout + done.stderr
    if "got:" not in output and done.returncode != 0:
        raise AssertionError(output)
    fired = _fired(output)
    return [verdict_of(recording, fired.get(recording.scenario.name, {})) for recording in lot]


def verdict_of(recording: Recording, fired: Mapping[str, Mapping[str, float]]) -> Verdict:
    """Return what fired while the run was watched; its series end for promtool after that."""
    end = recording.scrapes * SCRAPE_SECONDS
    within = {
        name: {severity: at for severity, at in severities.items() if at < end}
        for name, severities in fired.items()
    }
    return Verdict(
        recording.scenario,
        {name: severities for name, severities in within.items() if severities},
        recording.fault_seconds,
    )


def _test(recordings: Sequence[Recording], evaluation_seconds: int) -> Iterator[str]:
    """Yield the test file in pieces; made by hand, since YAML's own writer takes a minute."""
    seconds = max(recording.scrapes for recording in recordings) * SCRAPE_SECONDS
    yield f"rule_files: [{RULES_FILE}]\nevaluation_interval: {evaluation_seconds}s\ntests:\n"
    yield f"- interval: {SCRAPE_SECONDS}s\n  input_series:\n"
    for recording in recordings:
        yield from series_input(recording)
    query = _FIRST_FIRED.format(seconds=seconds, step=SCRAPE_SECONDS)
    yield f"  promql_expr_test:\n  - expr: {quoted(query)}\n    eval_time: {seconds}s\n"
    yield "    exp_samples: []\n"


def series_input(recording: Recording) -> Iterator[str]:
    """Yield the recorded series as input series of a unit test."""
    for series, values in recording.samples.items():
        yield f"  - series: '{_notation(series)}'\n    values: '{_samples(values)}'\n"


def _notation(series: Series) -> str:
    name, labels = series
    pairs = ",".join(f"{key}={quoted(value)}" for key, value in (*labels, ("namespace", "ml")))
    return f"{name}{{{pairs}}}".replace("'", "''")


def _samples(values: Sequence[float | None]) -> str:
    """Return samples in promtool's notation; where a series ends it goes stale, as a scrape's.

    NaN stands for a sample that was not taken: the series does not end there.
    """
    words: list[str] = []
    index, previous = 0, False
    while index < len(values):
        value, start = values[index], index
        unseen = value is not None and isnan(value)
        while index < len(values) and (
            values[index] == value or (unseen and _is_nan(values[index]))
        ):
            index += 1
        count = index - start
        if unseen:
            words.append(f"_x{count}")
            continue
        if value is None:
            if previous:
                words.append("stale")
                count -= 1
            words += [f"_x{count}"] if count else []
        else:
            assert isfinite(value)
            text = number_text(float(f"{value:.9g}"))
            words.append(f"{text}x{count - 1}" if count > 1 else text)
        previous = value is not None
    return " ".join(words)


def _is_nan(value: float | None) -> bool:
    return value is not None and isnan(value)


def _fired(output: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by run and alert, the time at which each severity fired first."""
    fired: dict[str, dict[str, dict[str, float]]] = {}
    for labels_text, value in _FOUND.findall(output.partition("got:")[2]):
        labels = dict(_LABEL.findall(labels_text))
        if "alertname" in labels:
            alerts = fired.setdefault(labels.get("run", ""), {})
            alerts.setdefault(labels["alertname"], {})[labels["severity"]] = float(value)
    return fired
