"""When each point of a log was: by its own times, or by the pace of the run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mp_agent.backtest.log.training_log import Point, TrainingLog
from mp_agent.node.accounting.medians import median

ASSUMED_STEP_SECONDS = 1.0
"""Where a log holds no time and none is given."""
START_SECONDS = 1_700_000_000.0
"""Unix time at which a log without times begins."""


@dataclass(frozen=True, slots=True)
class LogPace:
    """Time per step, where it is from, and the time of each point, which never goes back."""

    step_seconds: float
    origin: str
    times: Sequence[float]


def pace_of(log: TrainingLog, points: Sequence[Point], given_seconds: float | None) -> LogPace:
    """Return when the points of a log were. given_seconds: per step, where the user gave it."""
    if given_seconds is not None:
        usual, origin = given_seconds, "given"
        return LogPace(usual, origin, _by_steps(points, usual))
    usual, origin = _usual(log, points)
    if sum(point.time_seconds is not None for point in points) >= 2:
        return LogPace(usual, origin, _by_times(points, usual))
    return LogPace(usual, origin, _by_steps(points, usual))


def _usual(log: TrainingLog, points: Sequence[Point]) -> tuple[float, str]:
    """Return the usual time per step and where it is from."""
    timed = [point for point in points if point.time_seconds is not None]
    paces = [
        (after.time_seconds - before.time_seconds) / (after.step - before.step)
        for before, after in pairwise(timed)
        if after.time_seconds is not None
        and before.time_seconds is not None
        and after.step > before.step
        and after.time_seconds > before.time_seconds
    ]
    if paces:
        return median(paces), "times in the log"
    own = [point.step_seconds for point in points if point.step_seconds is not None]
    if own:
        return median(own), "step times in the log"
    if log.step_seconds is not None and log.step_seconds > 0:
        return log.step_seconds, "the run's total time in the log"
    return ASSUMED_STEP_SECONDS, "assumed"


def _by_steps(points: Sequence[Point], usual_seconds: float) -> list[float]:
    now = START_SECONDS
    times: list[float] = []
    for made, point in _made(points):
        now += made * (point.step_seconds or usual_seconds)
        times.append(now)
    return times


def _by_times(points: Sequence[Point], usual_seconds: float) -> list[float]:
    """Return the logged times; by steps where there is none, or where the clock went back."""
    first = next(point.time_seconds for point in points if point.time_seconds is not None)
    now, shift = first, 0.0
    times: list[float] = []
    for made, point in _made(points):
        expected = now + made * usual_seconds
        if point.time_seconds is None:
            now = expected if times else now
        elif point.time_seconds + shift < now:
            shift = expected - point.time_seconds
            now = expected
        else:
            now = point.time_seconds + shift
        times.append(now)
    return times


def _made(points: Iterable[Point]) -> Iterable[tuple[int, Point]]:
    """Yield how many steps each point is after the one before, and the point."""
    before: Point | None = None
    for point in points:
        made = 1 if before is None else point.step - before.step
        yield max(made, 1), point
        before = point
