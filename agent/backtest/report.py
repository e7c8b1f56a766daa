"""A backtest for people and programs: as tables for a terminal, as JSON, as one page."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from mp_agent.backtest.results import SEVERITIES, Blind, Difference, Failure, RunResult
from mp_agent.inputs.files import printable
from mp_agent.records.conditions import Alert
from mp_agent.report import terminal
from mp_agent.report.content import TONES, Cell, Curve, Plot, Plots, Table, Values, written
from mp_agent.report.numbers import counted, duration, number
from mp_agent.report.page import render

_ALERT_HEADINGS = (
    "run",
    "alert",
    "severity",
    "first step",
    "reported at",
    "duration",
    "times",
    "value",
)


def alerts_table(runs: Iterable[RunResult]) -> Table:
    """Return the alerts of runs."""
    rows = [_alert_cells(run, alert) for run in runs for alert in run.alerts]
    return Table(_ALERT_HEADINGS, rows, text=(0, 1, 2, 5))


def _alert_cells(run: RunResult, alert: Alert) -> tuple[str | Cell, ...]:
    labels = ", ".join(f"{name}={text}" for name, text in alert.labels.items())
    value, step = run.highest.get(alert.name, (alert.value, alert.value_step))
    return (
        printable(run.name),
        f"{alert.name} ({labels})" if labels else alert.name,
        Cell(alert.severity, TONES[alert.severity]),
        str(alert.first_step),
        str(alert.fired_step),
        duration(alert.duration_seconds) + (" +" if alert.ongoing else ""),
        str(alert.times),
        f"{number(value, 6)} at {step}",
    )


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


def summary_table(runs: Sequence[RunResult]) -> Table:
    """Return, for each alert that any run brought, the number of runs by worst severity."""
    rows = []
    for name in sorted({alert.name for run in runs for alert in run.alerts}):
        worst = [_worst(run, name) for run in runs]
        seeing = sum(all(spot.name != name for spot in run.blind) for run in runs)
        counts = (str(worst.count(severity)) for severity in SEVERITIES)
        rows.append((name, *counts, str(seeing)))
    return Table(("alert", *SEVERITIES, "of runs that could show it"), rows)


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
    quiet = [run for run in runs if not run.alerts]
    partly = [run for run in quiet if run.unseen]
    parts = [f"{len(quiet) - len(partly)} without an alert"]
    if listed:
        parts.append(f"by the worst alert {listed}")
    if partly:
        lacking = " or ".join(sorted({name for run in partly for name in run.unseen}))
        parts.append(f"{len(partly)} judged only in part, without {lacking}")
    return f"{counted(len(runs), f'{label}run')}: {', '.join(parts)}"


def _not_found(runs: Sequence[RunResult]) -> list[str]:
    """Return which of loss, norm and scale the logs do not hold; of several, in how many."""
    missing = Counter(name for run in runs for name in run.not_found)
    if not missing:
        return []
    listed = ", ".join(
        name if len(runs) == 1 else f"{name} in {count} of {len(runs)}"
        for name, count in sorted(missing.items())
    )
    return [f"not found: {listed}"]


def _worst(run: RunResult, name: str) -> str:
    severities = [alert.severity for alert in run.alerts if alert.name == name]
    return min(severities, key=SEVERITIES.index, default="")


_DETAILED_RUNS = 1
"""Up to so many runs, notes and blind conditions are printed for each of them."""


def print_backtest(runs: Sequence[RunResult], console: Console, *, details: bool = False) -> None:
    """Print the alerts, what was blind, and the summary."""
    alerting = [run for run in runs if run.alerts]
    if alerting:
        console.print(terminal.table(alerts_table(alerting)))
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
        console.print(terminal.table(summary_table(runs)))
    if runs:
        for line in (*_not_found(runs), *verdict(runs)):
            console.print(Text(line, style="bold"))


def print_failures(failures: Iterable[Failure], console: Console) -> None:
    """Print the logs that could not be read."""
    for failure in failures:
        line = f"mp-agent backtest: {printable(failure.problem)}"
        console.print(Text(line, style="red"))


def print_differences(found: Sequence[Difference], runs: int, console: Console) -> None:
    """Print what another setting changes."""
    if found:
        rows = [
            (one.run, one.label, one.name, _brief(one.before), _brief(one.after)) for one in found
        ]
        table = Table(("run", "label", "alert", "before", "after"), rows, text=range(5))
        console.print(terminal.table(table))
    came = sum(one.before is None for one in found)
    went = sum(one.after is None for one in found)
    text = f"{runs} runs: {came} alerts come, {went} go, {len(found) - came - went} change"
    console.print(Text(text, style="bold"))


def _brief(alert: Alert | None) -> Cell:
    if alert is None:
        return Cell("none")
    text = f"{alert.severity} at {alert.fired_step}, value {number(alert.value, 6)}"
    return Cell(text, TONES[alert.severity])


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
        "format": "mp_agent backtest",
        "version": 1,
        "set": list(settings),
        "runs": [_run(run) for run in runs],
        "failures": failures,
    }
    if found is not None:
        document["compare"] = list(compared)
        document["differences"] = found
    return written(document)


def _run(run: RunResult) -> dict[str, Any]:
    content = asdict(run)
    content.pop("curves")
    return {**content, "worst": run.worst}


_TITLES = {
    "loss": ("Loss", "× marks NaN or Inf"),
    "grad_norm": ("Gradient norm", "logarithmic; × marks NaN or Inf"),
    "loss_scale": ("Loss scale", "logarithmic; × marks skipped steps"),
    "learning_rate": ("Learning rate", ""),
}
_BASES = {"grad_norm": 10, "loss_scale": 2}
_MARKS = {
    "loss": ("loss", "NaN or Inf"),
    "grad_norm": ("grad_norm", "NaN or Inf"),
    "loss_scale": ("skipped", "skipped"),
}
"""The marks of a curve, and what they say."""
_WIDE = 1000.0
"""Largest over smallest loss from which on its axis is logarithmic."""
_OPEN_AT_MOST = 8
"""Runs with alerts whose curves are shown without a click."""


def plots_of(run: RunResult, index: int) -> Plots:
    """Return the plots of a run, with its index in their names.

    Places, not steps, are the axis: a resumed run has some steps twice.
    """
    curves = run.curves
    if curves is None:
        return Plots(places=(), plots=())
    return Plots(
        places=range(len(curves.step)),
        steps=curves.step,
        plots=[
            _plot(name, f"{index}-{name}", values, curves.marks)
            for name in _TITLES
            if (values := curves.values.get(name)) is not None
            and (name != "learning_rate" or len({v for v in values if v is not None}) > 1)
        ],
        spans=[
            (*_places(curves.step, span), TONES[alert.severity])
            for alert in run.alerts
            for span in alert.spans
        ],
        joined=True,
    )


def _plot(name: str, id: str, values: Values, marks: Mapping[str, Sequence[int]]) -> Plot:
    title, caption = _TITLES[name]
    known = [value for value in values if value is not None]
    base = _BASES.get(name)
    if name == "loss" and known and min(known) > 0 and max(known) >= _WIDE * min(known):
        base = 10
    drawn = [None if value is None or (base and value <= 0) else value for value in values]
    kind, why = _MARKS.get(name, ("", ""))
    return Plot(
        id=id,
        title=title,
        caption=caption,
        curves=[Curve(title.lower(), drawn)],
        log=base,
        marks=dict.fromkeys(marks.get(kind, ()), why),
    )


def _places(steps: Sequence[int], span: tuple[int, int]) -> tuple[int, int]:
    """Return the places of a span's first and last step."""
    first = next((place for place, step in enumerate(steps) if step >= span[0]), len(steps) - 1)
    last = next(
        (place for place in range(len(steps) - 1, -1, -1) if steps[place] <= span[1]), first
    )
    return first, max(first, last)


def as_html(
    runs: Sequence[RunResult], failures: Sequence[Failure], *, settings: Sequence[str] = ()
) -> str:
    """Return the backtest as one page that loads nothing."""
    alerting = [run for run in runs if run.alerts]
    ordered = [*alerting, *(run for run in runs if not run.alerts)]
    opened = {run.name for run in (alerting[:_OPEN_AT_MOST] if len(runs) > 1 else runs)}
    return render(
        "backtest",
        tool="backtest",
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        verdict="; ".join(verdict(runs)),
        good=all(run.worst != "critical" for run in runs),
        facts=[
            *([("set", ", ".join(settings))] if settings else ()),
            *(("not found", line.partition(": ")[2]) for line in _not_found(runs)),
        ],
        plots=[plots_of(run, index) for index, run in enumerate(ordered)],
        summary=summary_table(runs),
        alerts=alerts_table(alerting),
        runs=[
            {
                "result": run,
                "line": run_line(run),
                "blind": blind_lines(run.blind),
                "open": run.name in opened,
            }
            for run in ordered
        ],
        failures=[failure.problem for failure in failures],
    )
