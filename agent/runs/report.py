"""The comparison of two runs in words: for a terminal, as JSON, and as a page."""

from bisect import bisect_left
from collections.abc import Sequence
from math import isfinite

from rich.console import Console
from rich.text import Text

from mp_agent.report import terminal
from mp_agent.report.content import Curve, Plot, Plots, Table, picked, written
from mp_agent.report.numbers import NONE, finite, number
from mp_agent.report.page import render
from mp_agent.runs.divergence import MARKS, QUANTITIES, Departure, RunComparison


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
        return NONE
    return f"{100 * difference:.3g} %" if isfinite(difference) else "NaN or Inf"


def _value(value: float | None) -> str:
    return "NaN or Inf" if value is not None and not isfinite(value) else number(value)


def runs_as_json(comparison: RunComparison) -> str:
    """Return the comparison as JSON."""
    return written(
        {
            "format": "mp_agent run comparison",
            "version": 1,
            "verdict": verdict(comparison),
            "runs": [
                {**picked(run, "name", "source"), "steps": len(run.steps)}
                for run in (comparison.first, comparison.second)
            ],
            **picked(comparison, "departures", "layers", "limits"),
            "step": comparison.steps,
            **picked(comparison, "differences", "notes"),
        }
    )


_BEFORE = 4
_ALWAYS_SHOWN = ("loss", "grad_norm")


def print_runs(comparison: RunComparison, console: Console, *, rows: int) -> None:
    """Print where the runs part, the steps around it, and the layers; rows: at most so many."""
    console.print(terminal.verdict(verdict(comparison), good=comparison.departure is None))
    for label, run in (("first", comparison.first), ("second", comparison.second)):
        console.print(Text(f"{label}: {run.name}, {run.source}, {len(run.steps)} steps"))
    if comparison.departures:
        console.print(terminal.heading("Where they part"))
        for line in departure_lines(comparison.departures):
            console.print(Text(f"• {line}"))
    console.print(terminal.heading("Steps"))
    console.print(terminal.table(steps_table(comparison, rows), single=True))
    if comparison.layers:
        console.print(terminal.heading("Layers, in the order in which they part"))
        for line in departure_lines(comparison.layers[:rows]):
            console.print(Text(f"• {line}"))
        if len(comparison.layers) > rows:
            console.print(Text(f"and {len(comparison.layers) - rows} more layers", style="dim"))
    terminal.print_notes(console, comparison.notes)


def departure_lines(departures: Sequence[Departure]) -> list[str]:
    """Return the step and the difference of each."""
    return [f"step {one.step}: {departure_text(one)}" for one in departures]


def steps_table(comparison: RunComparison, rows: int) -> Table:
    """Return the steps around the departure: each quantity of both runs, and their difference."""
    headings = step_headings(comparison)
    shown, departure = shown_steps(comparison, rows), comparison.departure
    return Table(
        headings,
        [step_row(comparison, index) for index in shown],
        text=(len(headings) - 1,),
        marked=[
            row
            for row, index in enumerate(shown)
            if departure is not None and comparison.steps[index] == departure.step
        ],
    )


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
    return [
        *cells,
        " | ".join(text or NONE for text in marks) if any(p.marks for p in pair) else "",
    ]


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


_ROWS = 16
_LAYERS = 20
_DRAWN = ("loss", "grad_norm")


def runs_as_html(comparison: RunComparison) -> str:
    """Return the comparison as one page that loads nothing."""
    first, second, steps = comparison.first, comparison.second, comparison.steps
    return render(
        "runs",
        tool="compare",
        title=f"{first.name} and {second.name}",
        verdict=verdict(comparison),
        good=comparison.departure is None,
        facts=(
            ("first", first.source),
            ("second", second.source),
            ("steps in common", f"{len(steps)}, from {steps[0]} to {steps[-1]}"),
        ),
        plots=[plots_of(comparison)],
        departures=departure_lines(comparison.departures),
        layers=departure_lines(comparison.layers[:_LAYERS]),
        layers_omitted=max(0, len(comparison.layers) - _LAYERS),
        steps=steps_table(comparison, _ROWS),
        notes=comparison.notes,
    )


def plots_of(comparison: RunComparison) -> Plots:
    """Return both runs' curves, then how far they are apart."""
    drawn = [name for name in _DRAWN if name in comparison.differences]
    runs = {"series": comparison.first, "bad": comparison.second}
    curves = [
        Plot(
            id=name.replace("_", "-"),
            title=QUANTITIES[name].capitalize(),
            caption="of both runs at equal steps",
            curves=[
                Curve(
                    label,
                    finite([run.steps[step].values.get(name) for step in comparison.steps]),
                    color,
                )
                for label, (color, run) in zip(("first", "second"), runs.items(), strict=True)
            ],
        )
        for name in drawn
    ]
    differences = [
        Plot(
            id=f"{name.replace('_', '-')}-difference",
            title=f"Difference of the {QUANTITIES[name]}",
            caption="relative, logarithmic; the dashed line is the limit",
            curves=[Curve("difference", [v or None for v in comparison.differences[name]])],
            log=10,
            limits=[(comparison.limits[name], "")],
        )
        for name in drawn
    ]
    departure = comparison.departure
    return Plots(
        places=comparison.steps,
        plots=[*curves, *differences],
        marked=departure.step if departure else None,
    )
