"""Run scope: who keeps the other ranks waiting, and for how long a step usually takes."""

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.views import RunView

_NAMED_AT_MOST = 16


def _slowdown(run: RunView) -> Reading:
    return None if run.health.straggler is None else run.health.straggler.slowdown


def _delay(run: RunView) -> Reading:
    return None if run.health.straggler is None else run.health.straggler.delay_seconds


def _straggler(run: RunView) -> Reading:
    return None if run.health.straggler is None else {(str(run.health.straggler.rank),): 1.0}


def _laggards(run: RunView) -> Reading:
    return {(str(rank.rank), rank.phase): 1.0 for rank in run.health.laggards[:_NAMED_AT_MOST]}


WAITING_METRICS = (
    Metric(
        name="mp_agent.step.usual",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Median time of the last 64 steps.",
        read=lambda run: run.health.usual_step_seconds,
    ),
    Metric(
        name="mp_agent.standing",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Time since the run last completed a step, or changed between training and "
        "evaluation, a checkpoint or another phase.",
        read=lambda run: run.standing_seconds,
    ),
    Metric(
        name="mp_agent.pause.longest",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Longest such time in training from which the run recovered, halved every 12 "
        "hours: the duration of its rollouts and unmarked evaluations.",
        read=lambda run: run.longest_pause_seconds,
    ),
    Metric(
        name="mp_agent.phase.longest",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Longest completed stay in the run's current phase outside training, after the "
        "first step, halved every 12 hours; absent in training.",
        read=lambda run: run.longest_phase_seconds,
    ),
    Metric(
        name="mp_agent.straggler.slowdown",
        unit="{factor}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Time before the first collective of the slowest rank, divided by the median of "
        "all ranks; medians over 16 steps, the smallest of the last four.",
        read=_slowdown,
    ),
    Metric(
        name="mp_agent.straggler.delay",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Difference between the same rank and the median: its cost per step.",
        read=_delay,
    ),
    Metric(
        name="mp_agent.straggler.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("rank",),
        help="The same rank.",
        read=_straggler,
    ),
    Metric(
        name="mp_agent.ranks.lagging",
        unit="{rank}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Ranks that are behind the furthest one while no step is made; 0 while steps are "
        "made, and while a rank starts, evaluates or saves a checkpoint.",
        read=lambda run: float(len(run.health.laggards)),
    ),
    Metric(
        name="mp_agent.lagging_rank.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("rank", "phase"),
        help="Such a rank and its phase, 16 at most; gone: its process has ended, or its node "
        "does not report.",
        read=_laggards,
    ),
)
