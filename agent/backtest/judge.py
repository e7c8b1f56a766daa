"""The conditions judged by a log, and those that the log leaves blind."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.detector.detector import Change, Detector
from mp_agent.alerting.values import Values
from mp_agent.backtest.episodes import Episodes, curves_of
from mp_agent.backtest.log.steps import Course, TimedStep, course_of
from mp_agent.backtest.log.training_log import Scrape, TrainingLog
from mp_agent.backtest.results import Blind, RunResult
from mp_agent.catalog.metric import Metric, Scope
from mp_agent.node.accounting.accumulator import COUNTED, Accumulator, CounterStore
from mp_agent.node.accounting.gradients import FIRST_STEPS
from mp_agent.node.accounting.loss import WARM_UP_STEPS
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.conditions.messages import Observation
from mp_agent.node.conditions.tracker import MetricReader
from mp_agent.node.run.state import StepIngest
from mp_agent.node.series.snapshot_builder import RunExport
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason, Phase
from mp_agent.records.views import AgentView, RunView
from mp_agent.settings import Settings
from mp_agent.version import __version__

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


SCRAPE_SECONDS = 15.0
"""Longest time between two judgements while something holds."""
_JUDGEMENTS_PER_GAP = 240
_QUIET_SCRAPES = 2
"""Between two judgements while nothing holds and no counter of trouble moves."""
_LOW_STEPS = 3
"""Steps with a low norm from which on a condition may look at them."""
_ROUTINE = frozenset(("mp_agent.steps",))
"""Counters that move with every step of any run."""


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
    player = _Player(log, values, conditions)
    if log.scrapes:
        player.play_scrapes(log.scrapes)
    else:
        player.play(course)
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
        alerts=player.episodes.alerts(),
        blind=blind,
        notes=(*log.notes, *course.notes),
        curves=curves_of(log.points),
    )


@dataclass(slots=True)
class _Clock:
    begin_seconds: float
    now_seconds: float
    judged_seconds: float = float("-inf")
    point: int = 0
    """Index of the last logged point that was folded."""


class _Player:
    """One run as the root agent sees it, with the log in the place of the rings."""

    def __init__(self, log: TrainingLog, values: Values, conditions: Sequence[Condition]) -> None:
        self._log = log
        self._detector = Detector(conditions, values)
        readings = self._detector.readings
        counted = _counted(readings.names)
        self._ingest = StepIngest(
            Accumulator(
                values.limits,
                progress=Progress(),
                counters=CounterStore(metrics=counted),
                window_seconds=Settings.model_fields["window_seconds"].default,
            )
        )
        self._reader = MetricReader(readings.names, values.limits)
        self._scrape_seconds = SCRAPE_SECONDS * values.time_scale
        self._period_seconds = min(readings.period_seconds, self._scrape_seconds)
        self._quiet_seconds = min(_QUIET_SCRAPES * self._scrape_seconds, 2 * self._period_seconds)
        names = {metric.name for metric in counted[Scope.RUN]}
        self._telling = frozenset(names - _ROUTINE)
        self._last_trouble: tuple[object, ...] = ()
        # Asked for each step, and changed by judgements alone.
        self._holding = self._pending = False
        self._limits = values.limits
        self._run = _run(log.name)
        self.episodes = Episodes(values, self._series_labels)

    def play(self, course: Course) -> None:
        """Fold all steps, and judge the run on each on which a counter of trouble moved.

        While nothing happens it is judged once per period of its time; while something holds,
        between the points of a sparse log too.
        """
        begin_seconds = next(course.steps()).now_seconds
        clock = _Clock(begin_seconds, begin_seconds)
        for step, is_last in _with_last(course.steps()):
            self._pass_time(clock, step.now_seconds)
            self._fold(step)
            clock.point = step.point
            trouble = self._trouble()
            period_seconds = self._period_seconds
            if not self._holding:
                period_seconds = self._quiet_seconds
            due = self._pending or step.now_seconds - clock.judged_seconds >= period_seconds
            if due or trouble != self._last_trouble or is_last:
                self._last_trouble = trouble
                self._judge(clock, step.now_seconds)
        self.episodes.close(self._last_step(), clock.now_seconds)

    def play_scrapes(self, scrapes: tuple[Scrape, ...]) -> None:
        """Judge the series that were scraped, each scrape once."""
        for index, scrape in enumerate(scrapes):
            self._detector.readings.update(scrape.readings, scrape.time_seconds)
            step = self._log.points[index].step
            changes = self._detector.evaluate(scrape.time_seconds, step)
            self._note(changes, self._run, scrape.time_seconds, index, step)
        self.episodes.close(self._log.points[-1].step, scrapes[-1].time_seconds)

    def _fold(self, step: TimedStep) -> None:
        if step.begins_attempt:
            self._ingest.begin_attempt()
        if isinstance(step.item, MergedStep):
            if self._log.merged:
                self._ingest.fold_step(step.item)
            else:
                # Which optimizers were judged matters to layers only.
                self._ingest.account.fold_step(step.item)
        else:
            self._ingest.fold_layers(step.item)
        self._detector.readings.note_step(self._last_step())

    def _trouble(self) -> tuple[object, ...]:
        """Return what is different when something has happened."""
        account, limits = self._ingest.account, self._limits
        progress = account.progress
        learning, reference = progress.learning, progress.losses.reference
        return (
            *account.counters.entries(self._telling),
            progress.incident.first,
            progress.loss_scale.scale,
            *(
                (reason, steps >= limits["untrained_steps"], steps >= limits["constant_loss_steps"])
                for reason, steps in learning.untrained.items()
            ),
            progress.losses.rising_steps >= limits["loss_rising_steps"],
            reference.lost_steps > 0,
            reference.lost_steps >= limits["loss_lost_steps"],
            learning.scaled_clip_steps >= limits["scaled_clip_steps"],
            *(
                steps >= _LOW_STEPS
                for history in progress.norms.histories.values()
                for steps in history.below.values()
            ),
        )

    def _pass_time(self, clock: _Clock, until_seconds: float) -> None:
        """Judge the run now and then up to a time, as long as anything holds."""
        gap_seconds = until_seconds - clock.now_seconds
        wait_seconds = max(self._scrape_seconds, gap_seconds / _JUDGEMENTS_PER_GAP)
        at = clock.now_seconds + wait_seconds
        while at < until_seconds and self._holding:
            self._judge(clock, at)
            at += wait_seconds

    def _judge(self, clock: _Clock, now_seconds: float) -> None:
        clock.judged_seconds = clock.now_seconds = now_seconds
        account = self._ingest.account
        view = account.view(self._run, now_seconds)
        export = RunExport(
            run=self._log.name,
            node_rank=0,
            view=view,
            layers=tuple(one for own in account.layers.values() for one in own.values()),
            ranks=(),
            faded_ranks=frozenset(),
            agent=_agent_view(now_seconds - clock.begin_seconds),
            counters=account.counters,
        )
        self._detector.readings.update(self._reader.all_series(export), now_seconds)
        step = self._last_step()
        changes = self._detector.evaluate(now_seconds, step)
        self._holding, self._pending = self._detector.holding, self._detector.pending
        self._note(changes, view, now_seconds, clock.point, step)

    def _note(
        self, changes: list[Change], view: RunView, now_seconds: float, point: int, step: int
    ) -> None:
        if changes:
            observation = Observation(view, now_seconds, now_seconds)
            self.episodes.note(changes, observation, step=step, point=point)

    def _last_step(self) -> int:
        last = self._ingest.account.progress.last
        return last.step if last else 0

    def _series_labels(self, name: str) -> Iterator[dict[str, str]]:
        return (dict(labels) for labels, _ in self._detector.readings.standing(name))


def _with_last(steps: Iterator[TimedStep]) -> Iterator[tuple[TimedStep, bool]]:
    """Yield each of at least one step, and whether it is the last one."""
    step = next(steps)
    for following in steps:
        yield step, False
        step = following
    yield step, True


def _counted(needed: frozenset[str]) -> dict[Scope, list[Metric]]:
    """Return the metrics that conditions look at, of those that are counted."""
    return {
        scope: [metric for metric in metrics if metric.prometheus_name in needed]
        for scope, metrics in COUNTED.items()
    }


def _run(name: str) -> RunView:
    """Return a run of which nothing but its log is known."""
    identity = RankIdentity(
        run=name,
        attempt=0,
        launch="",
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        host="",
        pid=0,
        created_unix_ns=0,
        torch_version="",
        version=__version__,
    )
    return RunView(
        identity=identity,
        facts={},
        nodes=1,
        active=True,
        end_reason=EndReason.RUNNING,
        phase_name=Phase.FORWARD.name.lower(),
    )


def _agent_view(counting_seconds: float) -> AgentView:
    return AgentView(
        version=__version__,
        counting_seconds=counting_seconds,
        probe_seconds=0.0,
        probe_errors=0,
        setting_errors=0,
        records_dropped=0,
        series_dropped=0,
        scrape_duration_seconds=None,
        unsupported=(),
    )
