"""Prints a backtest in the terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mp_agent.backtest.compare import Difference
from mp_agent.backtest.report.text import (
    ALERT_HEADINGS,
    SUMMARY_HEADINGS,
    alert_cells,
    blind_lines,
    number,
    run_line,
    summary_rows,
    verdict,
)
from mp_agent.backtest.results import Alert, Failure, RunResult
from mp_agent.inputs.texts import printable

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
