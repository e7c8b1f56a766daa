"""What the page draws of a run, as data: curves over the steps, and spans of alerts."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from mp_agent.backtest.results import RunResult

_TITLES = {
    "loss": ("Loss", "× marks NaN or Inf"),
    "grad_norm": ("Gradient norm", "logarithmic; × marks NaN or Inf"),
    "loss_scale": ("Loss scale", "logarithmic; × marks skipped steps"),
    "learning_rate": ("Learning rate", ""),
}
_BASES = {"grad_norm": 10, "loss_scale": 2}
_MARKS = {"loss": "loss", "grad_norm": "grad_norm", "loss_scale": "skipped"}
_WIDE = 1000.0
"""Largest over smallest loss from which on its axis is logarithmic."""


def plots_of(run: RunResult) -> dict[str, Any]:
    """Return the plots of a run; every number is finite.

    Places, not steps, are the axis: a resumed run has some steps twice.
    """
    curves = run.curves
    if curves is None:
        return {"step": [], "curves": [], "spans": []}
    shown = []
    for name, (title, caption) in _TITLES.items():
        values = curves.values.get(name)
        known = [] if values is None else [value for value in values if value is not None]
        if values is None or (name == "learning_rate" and len(set(known)) < 2):
            continue
        base = _BASES.get(name)
        if name == "loss" and known and min(known) > 0 and max(known) >= _WIDE * min(known):
            base = 10
        shown.append(
            {
                "id": name,
                "title": title,
                "caption": caption,
                "log": base,
                "values": [
                    value if value is not None and (base is None or value > 0) else None
                    for value in values
                ],
                "marks": list(curves.marks.get(_MARKS.get(name, ""), ())),
                "description": _description(title, known),
            }
        )
    return {
        "step": list(curves.step),
        "curves": shown,
        "spans": [
            {
                "name": alert.name,
                "severity": alert.severity,
                "places": [_places(curves.step, span) for span in alert.spans],
            }
            for alert in run.alerts
        ],
        "resumed": [place for place, (a, b) in enumerate(pairwise(curves.step), 1) if b < a],
    }


def _places(steps: Sequence[int], span: tuple[int, int]) -> tuple[int, int]:
    """Return the places of a span's first and last step."""
    first = next((place for place, step in enumerate(steps) if step >= span[0]), len(steps) - 1)
    last = next(
        (place for place in range(len(steps) - 1, -1, -1) if steps[place] <= span[1]), first
    )
    return first, max(first, last)


def _description(title: str, known: Sequence[float]) -> str:
    if not known:
        return f"{title} per step: no value"
    return (
        f"{title} per step: smallest {min(known):.4g}, largest {max(known):.4g}, "
        f"last {known[-1]:.4g}"
    )
