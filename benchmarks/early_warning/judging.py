"""Judges what a rank wrote by the conditions of the catalog, as `mp-agent backtest` does."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import GROUPS
from mp_agent.alerting.values import Severity, values_in_force
from mp_agent.backtest.log.steps import course_of
from mp_agent.backtest.log.training_log import TrainingLog
from mp_agent.backtest.readers.flight import log_of_ranks
from mp_agent.node.flight.judge import RunJudge
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep

STEP_SECONDS = 10.0
"""Time per step that delays of the conditions count in, about that of a large model.

While nothing holds, a run is judged every 25 s: a condition is reported up to three steps late."""
LOSS_BASED = (
    "MpAgentLossSpike",
    "MpAgentLossDiverging",
    "MpAgentLossNonFinite",
    "MpAgentLossRelapsed",
)
_NOT_NUMERIC = ("ranks", "run", "agent")
"""Groups of conditions that are about something else than the numbers of a training."""


def _delivered(conditions: Iterable[Condition]) -> Iterator[Condition]:
    """Yield conditions without what is information alone, which reaches no one."""
    for condition in conditions:
        levels = [level for level in condition.levels if level.severity is not Severity.INFO]
        if levels:
            yield replace(condition, levels=tuple(levels))


CONDITIONS: Mapping[str, Condition] = {
    condition.name: condition
    for group, conditions in GROUPS.items()
    if group not in _NOT_NUMERIC
    for condition in _delivered(conditions)
}
SIGNALS = tuple(name for name in CONDITIONS if name not in LOSS_BASED)
"""The conditions that may come before the loss moves."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What fired in a training, with the step after which it was first reported."""

    fired: Mapping[str, int]
    """By condition, as a warning or worse."""
    critical: Mapping[str, int] = field(default_factory=dict)
    """By condition, as critical."""

    @property
    def loss_step(self) -> int | None:
        """The step of the first condition of the loss; None without one."""
        return min((step for name, step in self.fired.items() if name in LOSS_BASED), default=None)

    @property
    def critical_step(self) -> int | None:
        """The step of the first critical condition; None without one."""
        return min(self.critical.values(), default=None)


def judge(rank: RankLog) -> Verdict:
    """Return what the conditions, at their shipped thresholds, make of a training."""
    log = _timed(log_of_ranks([rank], source=rank.identity.run))
    judge = RunJudge(log.name, values_in_force(), CONDITIONS.values())
    judge.play(course_of(log, None).steps())
    fired: dict[str, int] = {}
    critical: dict[str, int] = {}
    for alert in judge.episodes.alerts():
        fired[alert.name] = min(alert.fired_step, fired.get(alert.name, alert.fired_step))
        if alert.severity == Severity.CRITICAL.value:
            first = critical.get(alert.name, alert.value_step)
            critical[alert.name] = min(alert.value_step, first)
    return Verdict(fired, critical)


def _timed(log: TrainingLog) -> TrainingLog:
    """Return a log in which a step takes `STEP_SECONDS`."""
    return replace(
        log,
        merged=tuple(
            replace(item, time_unix_seconds=item.sequence * STEP_SECONDS)
            if isinstance(item, MergedStep)
            else item
            for item in log.merged
        ),
        points=tuple(
            replace(point, time_seconds=number * STEP_SECONDS, step_seconds=STEP_SECONDS)
            for number, point in enumerate(log.points, start=1)
        ),
    )
