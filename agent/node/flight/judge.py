"""Plays a run again through the account and the conditions of the node agent."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.detector.detector import Change, Detector
from mp_agent.alerting.detector.readings import Reading
from mp_agent.alerting.values import Values
from mp_agent.catalog.metric import Metric, Scope
from mp_agent.node.accounting.accumulator import COUNTED, Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.conditions.messages import Observation
from mp_agent.node.conditions.tracker import MetricReader
from mp_agent.node.flight.episodes import Episodes
from mp_agent.node.run.state import StepIngest
from mp_agent.node.series.snapshot_builder import RunExport
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason, Phase
from mp_agent.records.views import AgentView, RunView
from mp_agent.settings import Settings
from mp_agent.version import __version__

SCRAPE_SECONDS = 15.0
"""Longest time between two judgements while something holds."""
_JUDGEMENTS_PER_GAP = 240
_QUIET_SCRAPES = 2
"""Between two judgements while nothing holds and no counter of trouble moves."""
_UNTRAINED = (
    "untrained_steps",
    "zero_rate_steps",
    "probably_untrained_steps",
    "constant_loss_steps",
)
_ROUTINE = frozenset(("mp_agent.steps",))
"""Counters that move with every step of any run."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What is known of a run at a time: a step, or the layers of one."""

    now_seconds: float
    item: MergedStep | MergedTable
    point: int
    """Index of the logged point, or step of the record, that it is from."""
    begins_attempt: bool = False


@dataclass(slots=True)
class _Clock:
    begin_seconds: float
    now_seconds: float
    judged_seconds: float = float("-inf")
    point: int = 0
    """Index of the last logged point that was folded."""


class RunJudge:
    """One run as the root agent sees it, with a log or a record in the place of the rings."""

    def __init__(
        self,
        name: str,
        values: Values,
        conditions: Iterable[Condition],
        *,
        merged: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Judge by `values` what the conditions say of a run.

        merged: whether the steps are as node agents merge them. progress: of the steps before.
        """
        self._name, self._merged = name, merged
        self._detector = Detector(conditions, values)
        readings = self._detector.readings
        counted = _counted(readings.names)
        self._ingest = StepIngest(
            Accumulator(
                values.limits,
                progress=progress or Progress(),
                counters=CounterStore(metrics=counted),
                window_seconds=Settings.model_fields["window_seconds"].default,
            )
        )
        self._reader = MetricReader(readings.names, values.limits)
        self._scrape_seconds = SCRAPE_SECONDS * values.time_scale
        self._period_seconds = min(readings.period_seconds, self._scrape_seconds)
        self._quiet_seconds = min(_QUIET_SCRAPES * self._scrape_seconds, 2 * self._period_seconds)
        names = {metric.name for metric in counted[Scope.RUN]}
        self._reporting = frozenset(names - _ROUTINE)
        self._last_trouble: tuple[object, ...] = ()
        # Asked for each step, and changed by judgements alone.
        self._holding = self._pending = False
        self._limits = values.limits
        self._run = _run(name)
        self.episodes = Episodes(values, self._series_labels)

    def play(self, steps: Iterator[TimedStep]) -> None:
        """Fold all steps, at least one; judge the run on each that moves a counter of trouble.

        While nothing happens it is judged once per period of its time; while something holds,
        between the points of a sparse log too.
        """
        first = next(steps)
        clock = _Clock(first.now_seconds, first.now_seconds)
        for step, is_last in _with_last(chain((first,), steps)):
            self._pass_time(clock, step.now_seconds)
            self.fold(step)
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

    def play_series(self, scrapes: Iterable[tuple[float, int, Sequence[Reading]]]) -> None:
        """Judge series that were scraped: (time, step, readings), each scrape once."""
        for index, (now_seconds, step, readings) in enumerate(scrapes):
            self._detector.readings.update(readings, now_seconds)
            changes = self._detector.evaluate(now_seconds, step)
            self._note(changes, self._run, now_seconds, index, step)
            last_step, last_seconds = step, now_seconds
        self.episodes.close(last_step, last_seconds)

    @property
    def account(self) -> Accumulator:
        """The run's account, up to the last step."""
        return self._ingest.account

    def fold(self, step: TimedStep) -> None:
        """Add a step, or the layers of one."""
        if step.begins_attempt:
            self._ingest.begin_attempt()
        if isinstance(step.item, MergedStep):
            if self._merged:
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
            *account.counters.entries(self._reporting),
            progress.incident.first,
            progress.loss_scale.scale,
            *(
                (reason, *(steps >= limits[limit] for limit in _UNTRAINED))
                for reason, steps in learning.untrained.items()
            ),
            *(
                (limit, steps >= limits[f"{limit}_steps"])
                for limit, steps in progress.loss_scale.low_steps.items()
            ),
            *(steps >= limits["sustained_steps"] for steps in progress.sustained.steps.values()),
            progress.losses.rising_steps >= limits["loss_rising_steps"],
            reference.lost_steps > 0,
            reference.lost_steps >= limits["loss_lost_steps"],
            progress.relapse.steps > 0,
            progress.norm_growth.growth >= limits["grad_norm_usual_growth"],
            progress.batches.view(),
            progress.rank_losses.outliers is not None,
            progress.rank_losses.level is not None,
            learning.scaled_clip_steps >= limits["scaled_clip_steps"],
            *(
                steps >= limits[f"{limit}_steps"]
                for history in progress.norms.histories.values()
                for limit, steps in history.below.items()
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
            run=self._name,
            node_rank=0,
            view=view,
            layers=tuple(one for own in account.layers.values() for one in own.values()),
            ranks=(),
            faded_ranks=frozenset(),
            agent=_agent_view(now_seconds - clock.begin_seconds),
            counters=account.counters,
        )
        step, evidence = self._last_step(), self._reader.evidence_steps(account.counters)
        series = self._reader.all_series(export)
        self._detector.readings.update(series, now_seconds, step, evidence)
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
