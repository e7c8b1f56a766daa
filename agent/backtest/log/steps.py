"""The points of a log as steps of a run, by its own times or by the pace of the run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite, isnan

from mp_agent.backtest.log.training_log import Point, TrainingLog
from mp_agent.node.accounting.windows import median
from mp_agent.node.flight.judge import TimedStep
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import MergedStep

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


_NORM_MAX = 1e150
"""The square of a larger norm is beyond float64."""
_SKIPS_SHOWN_MAX = 1000
"""Skipped steps between two points that are played one by one at most."""
_RANKS = frozenset((0,))
_COMPLETE = frozenset((GRADIENTS.name,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The points of a log with their times, and what was assumed of them."""

    log: TrainingLog
    points: Sequence[Point]
    pace: LogPace
    notes: tuple[str, ...] = ()

    def steps(self) -> Iterator[TimedStep]:
        """Yield all steps, at least one, in order; made one by one, for there may be many."""
        if self.log.merged:
            return _as_recorded(self.log)
        return _steps(self.log, self.points, self.pace)


def course_of(log: TrainingLog, given_step_seconds: float | None = None) -> Course:
    """Return the steps of a log with their times."""
    points, notes = _without_idle_scale(log.points)
    if given_step_seconds is not None:  # instead of what the log says of time
        points = [replace(each, time_seconds=None, step_seconds=None) for each in points]
    pace = pace_of(log, points, given_step_seconds)
    if log.merged:
        return Course(log=log, points=points, pace=pace, notes=tuple(notes))
    resumed = [after.step for before, after in pairwise(points) if after.step < before.step]
    if resumed:
        shown = ", ".join(map(str, resumed[:5])) + (", …" if len(resumed) > 5 else "")
        notes.append(
            f"steps go back {len(resumed)} time(s), taken as the run resumed at step {shown}"
        )
    if pace.origin == "assumed":
        notes.append(
            f"no times in the log: {pace.step_seconds:g} s per step assumed (--step-seconds)"
        )
    return Course(log=log, points=points, pace=pace, notes=tuple(notes))


def update_skipped(points: Sequence[Point], index: int) -> bool:
    """Return whether the update of a point was skipped, as far as the log shows it.

    A scaler skips what is not finite. Without one, finite losses afterwards show that a gradient
    that was not finite did not reach the weights.
    """
    point = points[index]
    if point.skipped is not None:
        return point.skipped
    if point.grad_norm is None and point.loss is None and index:
        # Some trainers log nothing but the scale of a step that overflowed.
        scale, before = point.loss_scale, points[index - 1].loss_scale
        return scale is not None and before is not None and scale < before
    if point.grad_norm is None or isfinite(point.grad_norm):
        return False
    if point.loss_scale is not None and point.loss_scale > 0:
        return True
    following = next((p for p in points[index + 1 : index + 20] if p.loss is not None), point)
    return following.loss is not None and not _lost(following)


def _lost(point: Point) -> bool:
    """Return whether a loss is not finite, or 0 with such a norm: some trainers log NaN as 0."""
    assert point.loss is not None
    broken = point.grad_norm is not None and not isfinite(point.grad_norm)
    return not isfinite(point.loss) or (point.loss == 0.0 and broken)


def _steps(log: TrainingLog, points: Sequence[Point], pace: LogPace) -> Iterator[TimedStep]:
    sequence, offset = 0, None
    before_seconds, before_step = None, None
    for index, (point, now) in enumerate(zip(points, pace.times, strict=True)):
        begins = before_step is not None and point.step < before_step
        if offset is None or begins:
            offset = point.step - _first_interval(points, index)
            sequence = 0
        made = max(point.step - offset - sequence, 1)
        earlier = now - pace.step_seconds if before_seconds is None else before_seconds
        skipped_here = update_skipped(points, index)
        skips = min(point.skipped_steps, _SKIPS_SHOWN_MAX)
        if skips and not skipped_here and (made == 1 or skips >= made):
            # Every step up to the point was skipped, its own as well.
            skipped_here, skips = True, skips - 1
        elif skipped_here and skips:
            skips -= 1
        made = max(made, skips + 1)
        for number in range(1, skips + 1):
            share = number / (skips + 1)
            between = sequence + max(number, round(made * share))
            yield TimedStep(
                earlier + (now - earlier) * share,
                _merged(_skip_of(point), between, earlier + (now - earlier) * share, skipped=True),
                index,
                begins and number == 1,
            )
        sequence += made
        seconds = point.step_seconds or (
            (now - before_seconds) / made
            if before_seconds is not None and now > before_seconds and not begins
            else pace.step_seconds
        )
        step = _merged(point, sequence, now, seconds, log.clip_max_norm, skipped=skipped_here)
        yield TimedStep(now, step, index, begins and not skips)
        before_seconds, before_step = now, point.step


def _first_interval(points: Sequence[Point], index: int) -> int:
    """Return how many steps the first point of an attempt stands for: as many as the next ones."""
    following = [p.step for p in points[index : index + 6]]
    gaps = sorted(b - a for a, b in pairwise(following) if b > a)
    interval = gaps[len(gaps) // 2] if gaps else 1
    return min(interval, points[index].step) if points[index].step > 0 else 1


def _skip_of(point: Point) -> Point:
    return Point(step=point.step, loss_scale=point.loss_scale)


def _merged(
    point: Point,
    sequence: int,
    now_seconds: float,
    step_seconds: float | None = None,
    clip_max_norm: float | None = None,
    *,
    skipped: bool,
) -> MergedStep:
    """Return a point as a merged step of a single rank."""
    norm, loss, scale = point.grad_norm, point.loss, point.loss_scale
    values = {"skipped": float(skipped)}
    gradients: dict[str, float] = {}
    if step_seconds is not None:
        values["step_seconds"] = step_seconds
    if loss is not None:
        values["loss_nonfinite"] = float(not isfinite(loss))
        if isfinite(loss):
            values["loss"] = loss
    if point.learning_rate is not None:
        values["learning_rate"] = point.learning_rate
    if scale is not None:
        values["loss_scale"] = scale
    if norm is not None and isfinite(norm):
        gradients["sum_squares"] = min(abs(norm), _NORM_MAX) ** 2
        gradients["nan_elements"] = gradients["inf_elements"] = 0.0
        if clip_max_norm is not None:
            values |= {"clip_max_norm": clip_max_norm, "clip_norm": min(abs(norm), _NORM_MAX)}
    elif norm is not None or (skipped and scale is not None):
        # How many elements it was is not known.
        isnt_a_number = norm is not None and isnan(norm)
        gradients |= {
            "nan_elements": float(isnt_a_number),
            "inf_elements": float(not isnt_a_number),
        }
    return MergedStep(
        sequence=sequence,
        step=point.step,
        time_unix_seconds=now_seconds,
        columns=values,
        families={GRADIENTS.name: gradients},
        complete=_COMPLETE,
        world_size=1,
        present_ranks=_RANKS,
        gradients_observed=norm is not None,
    )


def _as_recorded(log: TrainingLog) -> Iterator[TimedStep]:
    now, index = 0.0, -1
    for item in log.merged:
        if isinstance(item, MergedStep):
            now, index = max(now, item.time_unix_seconds), index + 1
        yield TimedStep(now, item, max(index, 0))


def _without_idle_scale(points: Sequence[Point]) -> tuple[Sequence[Point], list[str]]:
    """Return the points without a loss scale that is 1 throughout: it scales nothing.

    Steps that it skipped show that there is one, which has fallen to 1 before the log begins.
    """
    scales = {point.loss_scale for point in points} - {None}
    if scales != {1.0} or any(point.skipped for point in points):
        return points, []
    without = [replace(point, loss_scale=None) for point in points]
    return without, ["the loss scale is 1 throughout, so there is none"]
