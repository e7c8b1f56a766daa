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
        help="Time since the run last completed a step, or went from training to evaluation, a "
        "checkpoint or another phase, or back.",
        read=lambda run: run.standing_seconds,
    ),
    Metric(
        name="mp_agent.pause.longest",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Longest such time in training that ended, halved every 12 hours: what this run's "
        "rollouts and unmarked evaluations take.",
        read=lambda run: run.longest_pause_seconds,
    ),
    Metric(
        name="mp_agent.phase.longest",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Longest time in the phase outside training in which the run stands, of those that "
        "ended after the first step, halved every 12 hours; absent in training.",
        read=lambda run: run.longest_phase_seconds,
    ),
    Metric(
        name="mp_agent.straggler.slowdown",
        unit="{factor}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Time before its first collective of the rank that takes longest, by the median of "
        "all ranks; medians over 16 steps, of the last four the smallest.",
        read=_slowdown,
    ),
    Metric(
        name="mp_agent.straggler.delay",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="By how much the same rank is slower than the median: what it costs each step.",
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
        help="Ranks that have not come as far as the furthest one, while no step is made; 0 while "
        "steps are made, and while a rank starts, evaluates or saves a checkpoint.",
        read=lambda run: float(len(run.health.laggards)),
    ),
    Metric(
        name="mp_agent.lagging_rank.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("rank", "phase"),
        help="Such a rank and where it stands, 16 of them at most; gone: its process is, or "
        "nothing is heard of its node.",
        read=_laggards,
    ),
)
