"""Numbers and times of a backtest as texts."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from mp_agent.backtest.results import SEVERITIES, Alert, Blind, RunResult
from mp_agent.inputs.texts import printable

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
