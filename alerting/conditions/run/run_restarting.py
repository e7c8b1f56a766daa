"""MpAgentRunRestarting."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, Value, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, any_of
from mp_agent.alerting.expressions.signals import Count, Series, limit
from mp_agent.alerting.first_line.triage import Triage
from mp_agent.alerting.severity import Severity

_WINDOW = duration("restarts_window")
_MANY = limit("restarts")
_ATTEMPTS = Count(metric=metrics.ATTEMPTS, window=_WINDOW)
_FRESH_AGENTS = Series(metric=metrics.COUNTING, over=("resets", _WINDOW))
"""A container that takes its node agent with it leaves nothing that could count its attempts."""

_DESCRIPTION = (
    "Run {run} was started more than <restarts> times within <restarts_window>; {value|count} "
    "starts were counted."
)


def _fires(times: int) -> str:
    return _DESCRIPTION.replace("{run}", "demo").replace("{value|count}", str(times))


def _attempts(*values: Value) -> Track:
    return Track(metrics.ATTEMPTS, values)


_CRASH_LOOP = Example(
    title="a run that is restarted every two minutes",
    age_minutes=0,
    minutes=20,
    tracks=(_attempts(*(float(1 + minute // 2) for minute in range(21))),),
    fires={Severity.CRITICAL: _fires(8)},
    at=15,
    not_yet=(13,),
)

_WITHOUT_MEMORY = Example(
    title="a container that is restarted every two minutes together with its node agent",
    minutes=22,
    tracks=(
        _attempts(1),
        Track(metrics.COUNTING, (30.0, 90.0) * 11, {"node_rank": "0"}),
    ),
    fires={Severity.CRITICAL: _fires(8)},
    at=17,
    not_yet=(15,),
)

_PREEMPTED = Example(
    title="five preemptions within an hour",
    minutes=60,
    tracks=(_attempts(*(float(1 + minute // 12) for minute in range(60))),),
)

_LONG_AGO = Example(
    title="a run of twenty attempts, none of them recent, seen by a Prometheus that starts empty",
    minutes=12,
    tracks=(_attempts(*flat(None, 2), 20),),
)

RUN_RESTARTING = Condition(
    name="MpAgentRunRestarting",
    summary="A run is restarted repeatedly.",
    meaning="Each attempt ends within minutes: the job occupies its machines without getting "
    "beyond its last checkpoint.",
    confirm="mp_agent_run_attempts_total rises; mp_agent_step returns to the same step repeatedly.",
    remedies=(
        "Read the first traceback of an attempt in the launcher's log: the attempts usually end "
        "for the same reason.",
        "Stop the job until the cause is fixed; restarts only waste compute.",
        "If attempts end only on one node, remove the node.",
    ),
    why="A launcher restarts after any failure; a deterministic failure recurs, and no single "
    "attempt lasts long enough to be reported as failed.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="as in the last checkpoint",
                now="stop the job, since no attempt gets beyond the failure",
            ),
            when=any_of(Compare(_ATTEMPTS, ">", _MANY), Compare(_FRESH_AGENTS, ">", _MANY)),
            description=_DESCRIPTION,
            reason="No delay: that many attempts within an hour are a restart loop.",
        ),
    ),
    firing=(_CRASH_LOOP, _WITHOUT_MEMORY),
    quiet=(_PREEMPTED, _LONG_AGO),
)
