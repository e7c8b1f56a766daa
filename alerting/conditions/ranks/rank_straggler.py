"""MpAgentRankStraggler."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import standing
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, all_of, unless
from mp_agent.alerting.expressions.signals import Series, limit
from mp_agent.alerting.severity import Severity

_HOLD = duration("straggler_hold")
_SLOWDOWN = Series(metric=metrics.STRAGGLER_SLOWDOWN)
_COST = Series(metric=metrics.STRAGGLER_DELAY)
_MATTERS = limit("straggler_share") * Series(metric=metrics.STEP_USUAL)

_SLOW_RANK = Example(
    title="a rank at 1.6 times the median for half an hour; the alert lasts longer",
    minutes=51,
    tracks=(
        Track(metrics.STRAGGLER_SLOWDOWN, (*flat(1.05, 10), *flat(1.6, 31), 1.05)),
        Track(metrics.STRAGGLER_DELAY, (*flat(0.03, 10), *flat(0.4, 31), 0.03)),
        Track(metrics.STRAGGLER, (1,), {"rank": "5"}),
    ),
    fires={
        Severity.WARNING: "A rank of run demo takes 1.6 times as long as the median of all before "
        "its first collective. It is rank 5."
    },
    at=43,
    not_yet=(14, 50),
)

_BRIEF = Example(
    title="an occasional slow minute",
    minutes=20,
    tracks=(
        Track(metrics.STRAGGLER_SLOWDOWN, (1.1, 1.1, 1.8, 1.1) * 5),
        Track(metrics.STRAGGLER_DELAY, (0.1, 0.1, 0.5, 0.1) * 5),
    ),
)

_WITHIN = Example(
    title="ranks that differ by a quarter",
    minutes=20,
    tracks=(
        Track(metrics.STRAGGLER_SLOWDOWN, (1.25,)),
        Track(metrics.STRAGGLER_DELAY, (0.2,)),
    ),
)

_CHEAP = Example(
    title="three milliseconds instead of two, in steps of a second",
    minutes=20,
    tracks=(
        Track(metrics.STRAGGLER_SLOWDOWN, (1.5,)),
        Track(metrics.STRAGGLER_DELAY, (0.001,)),
    ),
)

_UNKNOWN = Example(
    title="ranks whose first collective cannot be determined",
    minutes=15,
    without=(metrics.STRAGGLER_SLOWDOWN, metrics.STRAGGLER_DELAY),
)

_HUNG = Example(
    title="a run that hung after a slow minute",
    minutes=18,
    tracks=(
        Track(metrics.STRAGGLER_SLOWDOWN, (*flat(1.05, 9), 1.6)),
        Track(metrics.STRAGGLER_DELAY, (*flat(0.03, 9), 0.4)),
        Track(metrics.STEP, ramp(5000, 60, 10)),
        Track(metrics.STEPS, ramp(5000, 60, 10)),
    ),
)

RANK_STRAGGLER = Condition(
    name="MpAgentRankStraggler",
    summary="A rank slows down the others.",
    meaning="All ranks train at the speed of the slowest: its delay in each step delays the "
    "whole job.",
    confirm="Plot mp_agent_rank_compute_seconds by rank; mp_agent_straggler_info names the "
    "slowest, mp_agent_rank_info its host and GPU, and mp_agent_rank_step_part_seconds_total "
    "(with measure_step_parts) whether it is slow in data, forward or optimizer.",
    remedies=(
        "Check the rank's GPU: clocks, temperature, power limit, other processes on it, ECC.",
        "Check its data loader: workers, storage, longer sequences than on other ranks.",
        "Replace the node; if the rank is still slow, its share of the work is the cause, "
        "otherwise the machine.",
    ),
    why="Before its first collective a rank waits for no other rank, so a longer time there is "
    "due to its own device, data or share of the work.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=unless(
                all_of(
                    Compare(_SLOWDOWN, ">", limit("straggler_ratio")),
                    Compare(_COST, ">", _MATTERS),
                ),
                standing(_HOLD),
            ),
            hold=_HOLD,
            keep=duration("rank_keep"),
            description="A rank of run {run} takes {value|number} times as long as the median of "
            "all before its first collective.{mp_agent_straggler_info| It is rank |rank}",
            reason="Jitter is temporary; a rank that crosses the limit repeatedly raises one "
            "alert.",
        ),
    ),
    firing=(_SLOW_RANK,),
    quiet=(_BRIEF, _WITHIN, _CHEAP, _UNKNOWN, _HUNG),
)
