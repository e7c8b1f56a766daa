"""MpAgentCoverageLow."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import standing
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, unless
from mp_agent.alerting.expressions.signals import Number, Series
from mp_agent.alerting.severity import Severity

_HOLD = duration("coverage_hold")
_COVERAGE = Series(metric=metrics.COVERAGE, aggregate="min")

_A_NODE_IS_SILENT = Example(
    title="a node of two ranks whose rows do not arrive; the alert lasts longer",
    minutes=42,
    tracks=(
        Track(metrics.COVERAGE, (*flat(1, 10), *flat(0.75, 21), 1)),
        Track(metrics.MISSING_RANK, (*flat(None, 10), *flat(1, 21), "stale"), {"rank": "2"}),
        Track(metrics.MISSING_RANK, (*flat(None, 10), *flat(1, 21), "stale"), {"rank": "3"}),
    ),
    fires={
        Severity.WARNING: "The merged metrics of run demo cover 75% of its ranks. Missing: rank "
        "2, 3.",
    },
    at=25,
    not_yet=(14, 40),
)

_OUTLASTED = Example(
    title="a node whose rows have just resumed",
    minutes=34,
    tracks=(Track(metrics.COVERAGE, (*flat(1, 10), *flat(0.75, 21), 1)),),
    fires={Severity.WARNING: "The merged metrics of run demo cover 75% of its ranks."},
    at=33,
)

_BRIEF = Example(
    title="a rank that misses the deadline occasionally",
    minutes=20,
    tracks=(Track(metrics.COVERAGE, (1, 0.75, 0.75, 1) * 5),),
)

_HUNG = Example(
    title="a run that hung when a rank died, with a last step without that rank",
    minutes=19,
    tracks=(
        Track(metrics.COVERAGE, (*flat(1, 10), 0.75)),
        Track(metrics.STEP, ramp(5000, 60, 11)),
        Track(metrics.STEPS, ramp(5000, 60, 11)),
    ),
)

_ENDED = Example(
    title="a run that ended, one rank earlier than the others",
    minutes=25,
    tracks=(
        Track(metrics.COVERAGE, (*flat(1, 10), 0.75)),
        Track(metrics.STEP, ramp(5000, 60, 11)),
        Track(metrics.STEPS, ramp(5000, 60, 11)),
        Track(metrics.RUN_ACTIVE, (*flat(1, 11), 0)),
        Track(metrics.RUN_END, (*flat(None, 11), 1), {"reason": "completed"}),
    ),
)

COVERAGE_LOW = Condition(
    name="MpAgentCoverageLow",
    summary="Merged metrics do not cover all ranks.",
    meaning="Data of the missing ranks is absent: a norm with missing shards is not evaluated "
    "by any condition, and sums and means cover only the other ranks.",
    confirm="mp_agent_missing_rank_info names the ranks; mp_agent_rank_up and "
    "mp_agent_push_failures_total show whether their node agent is alive and reaches the root.",
    remedies=(
        "Check the node agent of the missing ranks: its log, and whether it can reach the root "
        "agent's address and port.",
        "Raise merge_deadline_seconds if rows arrive late, for example on a slow network.",
        "If the rank itself has ended, see the run's other alerts.",
    ),
    why="A step is merged when all rows have arrived or its deadline has passed; ranks are "
    "missing because their agent is dead, disconnected or late.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=unless(Compare(_COVERAGE, "<", Number(1)), standing(_HOLD)),
            hold=_HOLD,
            keep=duration("rank_keep"),
            description="The merged metrics of run {run} cover {value|percent} of its "
            "ranks.{mp_agent_missing_rank_info| Missing: rank |rank}",
            reason="A single step without a rank is normal; a rank that is intermittently "
            "missing raises one alert.",
        ),
    ),
    firing=(_A_NODE_IS_SILENT, _OUTLASTED),
    quiet=(_BRIEF, _HUNG, _ENDED),
)
