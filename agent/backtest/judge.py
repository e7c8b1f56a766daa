"""The conditions judged by a log, and those that the log leaves blind."""

from collections.abc import Iterator, Mapping

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.values import Values
from mp_agent.backtest.curves import curves_of
from mp_agent.backtest.log.steps import course_of
from mp_agent.backtest.log.training_log import TrainingLog
from mp_agent.backtest.results import Blind, RunResult
from mp_agent.node.accounting.gradients import FIRST_STEPS
from mp_agent.node.accounting.loss import WARM_UP_STEPS
from mp_agent.node.flight.judge import Judge

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
    judge = Judge(log.name, values, conditions, merged=bool(log.merged))
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
        blind=blind,
        notes=(*log.notes, *course.notes),
        curves=curves_of(log.points),
    )
