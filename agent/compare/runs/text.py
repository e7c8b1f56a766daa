"""The comparison of two runs in words."""

from math import isfinite

from mp_agent.compare.runs.divergence import Departure, RunComparison
from mp_agent.compare.runs.series import MARKS, QUANTITIES
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
