"""The comparison of two runs in words, for a terminal and as JSON."""

import json
from bisect import bisect_left
from dataclasses import asdict
from math import isfinite

from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mp_agent.compare.report.model import plain
from mp_agent.compare.runs.divergence import MARKS, QUANTITIES, Departure, RunComparison
from mp_agent.flight.report.text import number


def verdict(comparison: RunComparison) -> str:
    """Return where the runs part, in one sentence."""
    steps = comparison.steps
    departure = comparison.departure
    if departure is None:
        return f"The runs agree from step {steps[0]} to {steps[-1]}."
    return f"The runs part at step {departure.step}: {departure_text(departure)}."


def departure_text(departure: Departure) -> str:
    """Return what differs, and by how much."""
    if departure.quantity in MARKS:
        which = "the first" if departure.first else "the second"
        return f"{MARKS[departure.quantity]} in {which} run alone"
    name = departure.layer or QUANTITIES[departure.quantity]
    values = f"{_value(departure.first)} against {_value(departure.second)}"
    return f"{name} {values}, {difference_text(departure.difference)} apart"


def difference_text(difference: float | None) -> str:
    """Return a relative difference in percent."""
    if difference is None:
        return "–"
    return f"{100 * difference:.3g} %" if isfinite(difference) else "NaN or Inf"


def _value(value: float | None) -> str:
    return "NaN or Inf" if value is not None and not isfinite(value) else number(value)


FORMAT = "mp_agent run comparison"
VERSION = 1
"""Rises when a key changes its meaning or goes; keys may be added without it."""


def runs_as_json(comparison: RunComparison) -> str:
    """Return the comparison as JSON; a number that is not finite is null."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "verdict": verdict(comparison),
        "runs": [
            {"name": run.name, "source": run.source, "steps": len(run.steps)}
            for run in (comparison.first, comparison.second)
        ],
        "departures": [asdict(one) for one in comparison.departures],
        "layers": [asdict(one) for one in comparison.layers],
        "limits": dict(comparison.limits),
        "step": list(comparison.steps),
        "differences": {name: list(values) for name, values in comparison.differences.items()},
        "notes": list(comparison.notes),
    }
    return json.dumps(plain(document), indent=2, ensure_ascii=True, allow_nan=False)


_BEFORE = 4
_ALWAYS_SHOWN = ("loss", "grad_norm")


def print_runs(comparison: RunComparison, console: Console, *, rows: int) -> None:
    """Print where the runs part, the steps around it, and the layers; rows: at most so many."""
    style = "green" if comparison.departure is None else "red"
    console.print(Panel(Text(verdict(comparison), style="bold"), border_style=style, expand=False))
    for label, run in (("first", comparison.first), ("second", comparison.second)):
        console.print(Text(f"{label}: {run.name}, {run.source}, {len(run.steps)} steps"))
    if comparison.departures:
        console.print(Rule("Where they part", align="left"))
        for one in comparison.departures:
            console.print(Text(f"• step {one.step}: {departure_text(one)}"))
    console.print(Rule("Steps", align="left"))
    console.print(_steps(comparison, rows))
    if comparison.layers:
        console.print(Rule("Layers, in the order in which they part", align="left"))
        for one in comparison.layers[:rows]:
            console.print(Text(f"• step {one.step}: {departure_text(one)}"))
        if len(comparison.layers) > rows:
            console.print(Text(f"and {len(comparison.layers) - rows} more layers", style="dim"))
    for note in comparison.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def shown_steps(comparison: RunComparison, rows: int) -> list[int]:
    """Return the indices of the steps around the departure; of the last ones without one."""
    steps = comparison.steps
    if comparison.departure is None:
        begin = max(0, len(steps) - rows)
    else:
        begin = max(0, bisect_left(steps, comparison.departure.step) - _BEFORE)
    return list(range(begin, min(begin + rows, len(steps))))


def step_row(comparison: RunComparison, index: int) -> list[str]:
    """Return the cells of a step: each quantity of both runs, and their difference."""
    step = comparison.steps[index]
    pair = [run.steps[step] for run in (comparison.first, comparison.second)]
    cells = [str(step)]
    for quantity in _shown_quantities(comparison):
        cells += [number(one.values.get(quantity)) for one in pair]
        cells.append(difference_text(comparison.differences[quantity][index]))
    marks = ("; ".join(MARKS[mark] for mark in sorted(one.marks)) for one in pair)
    return [*cells, " | ".join(text or "–" for text in marks) if any(p.marks for p in pair) else ""]


def step_headings(comparison: RunComparison) -> list[str]:
    """Return the headings above `step_row`."""
    headings = ["step"]
    for quantity in _shown_quantities(comparison):
        headings += [QUANTITIES[quantity], "second", "apart"]
    return [*headings, "remarks"]


def _shown_quantities(comparison: RunComparison) -> list[str]:
    """Return loss and gradient norm, and whatever else parts."""
    parted = {one.quantity for one in comparison.departures}
    return [name for name in comparison.differences if name in parted or name in _ALWAYS_SHOWN]


def _steps(comparison: RunComparison, rows: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    headings = step_headings(comparison)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "remarks" else "right", no_wrap=True)
    apart = comparison.departure.step if comparison.departure else None
    for index in shown_steps(comparison, rows):
        style = "red" if comparison.steps[index] == apart else ""
        table.add_row(*map(Text, step_row(comparison, index)), style=style)
    return table
