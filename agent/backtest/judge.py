"""The conditions judged by a log, those that the log leaves blind, and its points as curves."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.values import Values
from mp_agent.backtest.log.steps import course_of, update_skipped
from mp_agent.backtest.log.training_log import Point, TrainingLog
from mp_agent.backtest.results import Blind, RunCurves, RunResult
from mp_agent.node.accounting.gradients import FIRST_STEPS
from mp_agent.node.accounting.loss import WARM_UP_STEPS
from mp_agent.node.flight.judge import RunJudge
from mp_agent.records.conditions import Alert

_BASELINES: Mapping[Quantity, tuple[str, int, str]] = {
    Quantity.LOSS: ("loss", WARM_UP_STEPS, "losses"),
    Quantity.GRAD_NORM: ("grad_norm", FIRST_STEPS, "gradient norms"),
}
"""Quantity → field of a point, and of how many of them its usual level needs more."""


def blind_spots(log: TrainingLog) -> Iterator[Blind]:
    """Yield the conditions that a log cannot show, in the catalog's order, with the reason.

    What Prometheus scraped was judged by all steps, however few scrapes there are.
    """
    held = log.held
    for condition in CONDITIONS:
        lacking = min((set(needed) - held for needed in condition.needs), key=len)
        if lacking:
            names = " and ".join(sorted(quantity.value for quantity in lacking))
            yield Blind(condition.name, f"the log does not hold {names}")
        elif condition.usual is not None and not log.scrapes:
            quantity, needed_points, plural = _BASELINES[condition.usual]
            points = sum(getattr(point, quantity) is not None for point in log.points)
            if points <= needed_points:
                yield Blind(
                    condition.name,
                    f"the log holds {points} {plural}; a usual level needs more than "
                    f"{needed_points}",
                )


_SOUGHT = (Quantity.LOSS, Quantity.GRAD_NORM, Quantity.LOSS_SCALE)
"""What a training log usually holds; the loss scale only with FP16."""


def play(
    log: TrainingLog,
    values: Values,
    *,
    step_seconds: float | None = None,
    only: frozenset[str] | None = None,
) -> RunResult:
    """Return what the conditions make of a log.

    step_seconds: time per step, if it is given. only: names of the conditions to judge; None: all.
    """
    course = course_of(log, step_seconds)
    blind = tuple(blind_spots(log))
    idle = {spot.name for spot in blind}
    conditions = [
        condition
        for condition in CONDITIONS
        if condition.name not in idle and (only is None or condition.name in only)
    ]
    judge = RunJudge(log.name, values, conditions, merged=bool(log.merged))
    if log.scrapes:
        pairs = zip(log.scrapes, log.points, strict=False)
        judge.play_series((s.time_seconds, point.step, s.readings) for s, point in pairs)
    else:
        judge.play(course.steps())
    times = course.pace.times
    return RunResult(
        name=log.name,
        source=log.source,
        format=log.format,
        points=len(log.points),
        first_step=log.points[0].step,
        last_step=log.points[-1].step,
        seconds=times[-1] - times[0],
        step_seconds=course.pace.step_seconds,
        pace_origin=course.pace.origin,
        alerts=judge.episodes.alerts(),
        highest=dict(_highest(judge.episodes.alerts(), log.points)),
        blind=blind,
        not_found=tuple(quantity.value for quantity in _SOUGHT if quantity not in log.held),
        notes=(*log.notes, *course.notes),
        curves=curves_of(log.points),
    )


def _highest(
    alerts: Iterable[Alert], points: Sequence[Point]
) -> Iterator[tuple[str, tuple[float, int]]]:
    """Yield the highest loss or norm, and its step, of alerts on how many are above the usual."""
    usual = {condition.name: condition.usual for condition in CONDITIONS}
    for alert in alerts:
        quantity = usual[alert.name]
        if quantity is None:
            continue
        logged = [
            (value, point.step)
            for point in points
            if any(first <= point.step <= last for first, last in alert.spans)
            and (value := _finite(getattr(point, _BASELINES[quantity][0]))) is not None
        ]
        if logged:
            yield alert.name, max(logged)


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
