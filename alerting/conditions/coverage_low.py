"""MpAgentCoverageLow."""

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import standing
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples import Example, Track, flat, ramp
from mp_agent.alerting.predicates import Compare, unless
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.signals import Number, Series

_HOLD = duration("coverage_hold")
_COVERAGE = Series(metric=metrics.COVERAGE, aggregate="min")

_A_NODE_IS_SILENT = Example(
    title="a node of two ranks whose rows do not arrive; the alert outlasts it",
    minutes=42,
    tracks=(
        Track(metrics.COVERAGE, (*flat(1, 10), *flat(0.75, 21), 1)),
        Track(metrics.MISSING_RANK, (*flat(None, 10), *flat(1, 21), "stale"), {"rank": "2"}),
        Track(metrics.MISSING_RANK, (*flat(None, 10), *flat(1, 21), "stale"), {"rank": "3"}),
    ),
    fires={
        Severity.WARNING: "Merges of run demo cover 75% of its ranks. Missing: rank 2, 3.",
    },
    at=25,
    not_yet=(14, 40),
)

_OUTLASTED = Example(
    title="a node whose rows have just come back",
    minutes=34,
    tracks=(Track(metrics.COVERAGE, (*flat(1, 10), *flat(0.75, 21), 1)),),
    fires={Severity.WARNING: "Merges of run demo cover 75% of its ranks."},
    at=33,
)

_BRIEF = Example(
    title="a rank that misses the deadline now and then",
    minutes=20,
    tracks=(Track(metrics.COVERAGE, (1, 0.75, 0.75, 1) * 5),),
)

_HUNG = Example(
    title="a run that hung when a rank died, its last step without that rank",
    minutes=19,
    tracks=(
        Track(metrics.COVERAGE, (*flat(1, 10), 0.75)),
        Track(metrics.STEP, ramp(5000, 60, 11)),
        Track(metrics.STEPS, ramp(5000, 60, 11)),
    ),
)

_ENDED = Example(
    title="a run that ended, one rank sooner than the others",
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
    summary="Merged numbers do not cover all ranks.",
    meaning="What the missing ranks see is not seen: a norm that lacks shards is judged by no "
    "condition, and sums and means are of the others alone.",
    confirm="mp_agent_missing_rank_info names the ranks; mp_agent_rank_up and "
    "mp_agent_push_failures_total tell whether their node agent lives and reaches the root.",
    remedies=(
        "Look at the node agent of the missing ranks: its log, and whether it reaches the root "
        "agent's address and port.",
        "Raise merge_deadline_seconds if rows only come late, as on a slow network.",
        "If the rank itself is gone, see the run's other alerts.",
    ),
    why="A step is merged when all rows are in or its deadline is over; ranks are missing because "
    "their agent is dead, cut off or late.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=unless(Compare(_COVERAGE, "<", Number(1)), standing(_HOLD)),
            hold=_HOLD,
            keep=duration("rank_keep"),
            description="Merges of run {run} cover {value|percent} of its ranks."
            "{mp_agent_missing_rank_info| Missing: rank |rank}",
            reason="A single step without a rank is routine; a rank that is in and out is one "
            "alert.",
        ),
    ),
    firing=(_A_NODE_IS_SILENT, _OUTLASTED),
    quiet=(_BRIEF, _HUNG, _ENDED),
)
