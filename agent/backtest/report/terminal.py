"""A backtest as tables for a terminal, and as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from math import isfinite
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mp_agent.backtest.results import SEVERITIES, Alert, Blind, Difference, Failure, RunResult
from mp_agent.inputs.files import printable

ALERT_HEADINGS = (
    "run",
    "alert",
    "severity",
    "first step",
    "reported at",
    "duration",
    "times",
    "value",
)


def alert_cells(run: RunResult, alert: Alert) -> tuple[str, ...]:
    """Return an alert in the order of `ALERT_HEADINGS`."""
    labels = ", ".join(f"{name}={text}" for name, text in alert.labels.items())
    return (
        printable(run.name),
        f"{alert.name} ({labels})" if labels else alert.name,
        alert.severity,
        str(alert.first_step),
        str(alert.fired_step),
        duration(alert.duration_seconds) + (" +" if alert.ongoing else ""),
        str(alert.times),
        f"{number(alert.value)} at {alert.value_step}",
    )


def number(value: float) -> str:
    """Return a number in at most six digits."""
    return f"{value:.6g}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units: `2 h 5 min`."""
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    rest, words = round(seconds), []
    for unit, size in units:
        count, rest = divmod(rest, size)
        if count:
            words.append(f"{count} {unit}")
    return " ".join(words[:2]) or "0 s"


def run_line(run: RunResult) -> str:
    """Return in one line what a run's log holds."""
    label = f", {run.label}" if run.label else ""
    return (
        f"{printable(run.name)}{label}: {run.points} points of {run.format}, steps "
        f"{run.first_step} to {run.last_step}, {run.step_seconds:.3g} s per step "
        f"({run.pace_origin})"
    )


def blind_lines(spots: Iterable[Blind]) -> list[str]:
    """Return the conditions that could not be judged, those with the same reason together."""
    ordered = sorted(spots, key=lambda spot: spot.reason)
    return [
        f"{reason}: {', '.join(spot.name for spot in group)}"
        for reason, group in groupby(ordered, key=lambda spot: spot.reason)
    ]


SUMMARY_HEADINGS = ("alert", *SEVERITIES, "of runs that could show it")


def summary_rows(runs: Sequence[RunResult]) -> list[tuple[str, ...]]:
    """Return, for each alert that any run brought, the number of runs by worst severity."""
    names = sorted({alert.name for run in runs for alert in run.alerts})
    rows = []
    for name in names:
        worst = [_worst(run, name) for run in runs]
        seeing = sum(all(spot.name != name for spot in run.blind) for run in runs)
        counts = (str(worst.count(severity)) for severity in SEVERITIES)
        rows.append((name, *counts, str(seeing)))
    return rows


def verdict(runs: Sequence[RunResult]) -> list[str]:
    """Return in a line how many runs brought what, and in one per label how many of those."""
    parts = [_share(runs, "")]
    for label in ("healthy", "wrong", "unclear"):
        own = [run for run in runs if run.label == label]
        if own:
            parts.append(_share(own, f"{label} "))
    return parts


def _share(runs: Sequence[RunResult], label: str) -> str:
    counts = {severity: sum(run.worst == severity for run in runs) for severity in SEVERITIES}
    listed = ", ".join(f"{count} {severity}" for severity, count in counts.items() if count)
    quiet = sum(not run.alerts for run in runs)
    return f"{len(runs)} {label}run{'s' if len(runs) != 1 else ''}: {quiet} without an alert" + (
        f", by the worst alert {listed}" if listed else ""
    )


def _worst(run: RunResult, name: str) -> str:
    severities = [alert.severity for alert in run.alerts if alert.name == name]
    return min(severities, key=SEVERITIES.index, default="")


STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
_NUMERIC = frozenset(("first step", "reported at", "times", "value"))
_DETAILED_RUNS = 1
"""Up to so many runs, notes and blind conditions are printed for each of them."""


def print_backtest(runs: Sequence[RunResult], console: Console, *, details: bool = False) -> None:
    """Print the alerts, what was blind, and the summary."""
    alerting = [run for run in runs if run.alerts]
    if alerting:
        console.print(_alerts(alerting))
    if details or len(runs) <= _DETAILED_RUNS:
        for run in runs:
            console.print(Text(run_line(run), style="bold"))
            for note in run.notes:
                console.print(Text(f"  note: {note}", style="dim"))
            for line in blind_lines(run.blind):
                console.print(Text(f"  blind: {line}", style="dim"))
    else:
        for line in _common_blindness(runs):
            console.print(Text(line, style="dim"))
    if len(runs) > 1 and alerting:
        console.print(_summary(runs))
    if runs:
        for line in verdict(runs):
            console.print(Text(line, style="bold"))


def print_failures(failures: Iterable[Failure], console: Console) -> None:
    """Print the logs that could not be read."""
    for failure in failures:
        line = f"mp-agent backtest: {printable(failure.problem)}"
        console.print(Text(line, style="red"))


def print_differences(found: Sequence[Difference], runs: int, console: Console) -> None:
    """Print what another setting changes."""
    if found:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("run", "label", "alert", "before", "after"):
            table.add_column(heading, overflow="fold")
        for one in found:
            cells = (one.run, one.label, one.name)
            table.add_row(*map(Text, cells), _brief(one.before), _brief(one.after))
        console.print(table)
    came = sum(one.before is None for one in found)
    went = sum(one.after is None for one in found)
    text = f"{runs} runs: {came} alerts come, {went} go, {len(found) - came - went} change"
    console.print(Text(text, style="bold"))


def _brief(alert: Alert | None) -> Text:
    if alert is None:
        return Text("none", style="dim")
    text = f"{alert.severity} at {alert.fired_step}, value {number(alert.value)}"
    return Text(text, style=STYLES[alert.severity])


def _alerts(runs: Sequence[RunResult]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ALERT_HEADINGS:
        table.add_column(heading, justify="right" if heading in _NUMERIC else "left")
    for run in runs:
        for alert in run.alerts:
            cells = map(Text, alert_cells(run, alert))
            table.add_row(*cells, style=STYLES[alert.severity])
    return table


def _summary(runs: Sequence[RunResult]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in SUMMARY_HEADINGS:
        table.add_column(heading, justify="left" if heading == "alert" else "right")
    for row in summary_rows(runs):
        table.add_row(*row)
    return table


def _common_blindness(runs: Sequence[RunResult]) -> list[str]:
    """Return what no run could show, and how many runs lack what others hold."""
    counts: dict[tuple[str, str], int] = {}
    for run in runs:
        for spot in run.blind:
            key = (spot.name, spot.reason.partition("; ")[0])
            counts[key] = counts.get(key, 0) + 1
    everywhere = sorted({name for (name, _), count in counts.items() if count == len(runs)})
    lines = [f"blind in every run: {', '.join(everywhere)}"] if everywhere else []
    some = {
        name: sum(any(spot.name == name for spot in run.blind) for run in runs)
        for name in {name for name, _ in counts} - set(everywhere)
    }
    if some:
        listed = ", ".join(f"{name} in {count}" for name, count in sorted(some.items()))
        lines.append(f"blind in some: {listed}; --details says why")
    return lines


FORMAT = "mp_agent backtest"
VERSION = 1
"""Rises when a key changes its meaning or goes; keys may be added without it."""


def as_json(
    runs: Sequence[RunResult],
    failures: Sequence[Failure],
    *,
    settings: Sequence[str] = (),
    compared: Sequence[str] = (),
    found: Sequence[Difference] | None = None,
) -> str:
    """Return the backtest as JSON; a number that is not finite is null.

    settings, compared: what was set. found: the differences, where two settings were compared.
    """
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "set": list(settings),
        "runs": [_run(run) for run in runs],
        "failures": [asdict(failure) for failure in failures],
    }
    if found is not None:
        document["compare"] = list(compared)
        document["differences"] = [asdict(difference) for difference in found]
    return json.dumps(_finite(document), indent=2, ensure_ascii=True, allow_nan=False)


def _run(run: RunResult) -> dict[str, Any]:
    content = asdict(run)
    content.pop("curves")
    return {**content, "worst": run.worst}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
