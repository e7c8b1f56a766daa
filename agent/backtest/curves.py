"""The points of a judged log as curves for a page."""

from collections.abc import Sequence
from math import isfinite

from mp_agent.backtest.log.steps import update_skipped
from mp_agent.backtest.log.training_log import Point
from mp_agent.backtest.results import RunCurves

PLACES_MAX = 1200
"""Points of a curve at most."""
NAMES = ("loss", "grad_norm", "learning_rate", "loss_scale")


def curves_of(points: Sequence[Point]) -> RunCurves:
    """Return the curves of a log's points; of those with equal numbers everywhere, none."""
    kept = _kept(points)
    shown = [points[index] for index in kept]
    values = {}
    for name in NAMES:
        column = [_finite(getattr(point, name)) for point in shown]
        if any(value is not None for value in column):
            values[name] = column
    # Where a point with trouble was thinned out, the next one that is shown bears its mark.
    marks: dict[str, list[int]] = {"loss": [], "grad_norm": [], "skipped": []}
    place = 0
    for index, point in enumerate(points):
        while place < len(kept) - 1 and kept[place] < index:
            place += 1
        for name in ("loss", "grad_norm"):
            value = getattr(point, name)
            if value is not None and not isfinite(value):
                marks[name].append(place)
        if point.skipped_steps or update_skipped(points, index):
            marks["skipped"].append(place)
    return RunCurves(
        step=[point.step for point in shown],
        values=values,
        marks={name: sorted(set(places)) for name, places in marks.items() if places},
    )


def _kept(points: Sequence[Point]) -> list[int]:
    """Return the indices to draw: of each stretch the first, and each curve's extremes."""
    if len(points) <= PLACES_MAX:
        return list(range(len(points)))
    stretches = PLACES_MAX // (1 + 2 * 2)
    size = -(-len(points) // stretches)
    kept = {0, len(points) - 1}
    for begin in range(0, len(points), size):
        indices = range(begin, min(begin + size, len(points)))
        kept.add(begin)
        for name in NAMES[:2]:
            known = [
                (v, i) for i in indices if (v := _finite(getattr(points[i], name))) is not None
            ]
            if known:
                kept.update((min(known)[1], max(known)[1]))
    return sorted(kept)


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
