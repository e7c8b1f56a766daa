"""MpAgentRunVanished."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, Value, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import (
    Compare,
    Gone,
    Seen,
    Unreachable,
    any_of,
    unless,
)
from mp_agent.alerting.expressions.signals import Number, Series
from mp_agent.alerting.severity import Severity

_WINDOW = duration("vanished_window")
_LAST_ACTIVE = Series(metric=metrics.RUN_ACTIVE, aggregate="min", over=("last_over_time", _WINDOW))
"""0 where the end of the run was seen at any target."""

_ELSEWHERE = {"instance": "node-7:9464"}
_GONE_AT_TEN: tuple[Value, ...] = (*flat(1, 10), "stale")

_VANISHED = Example(
    title="node and agent die, and service discovery drops the target",
    minutes=46,
    tracks=(Track("up", _GONE_AT_TEN),),
    ends=10,
    fires={Severity.WARNING: "The series of run demo stopped, and no end of the run was reported."},
    at=16,
    not_yet=(11, 14, 45),
)

_DEAD_BUT_LISTED = Example(
    title="a node that dies and remains a target",
    minutes=24,
    tracks=(Track("up", (*flat(1, 10), 0)),),
    ends=10,
    fires={Severity.WARNING: "The series of run demo stopped, and no end of the run was reported."},
    at=24,
    not_yet=(19,),
)

_UNREACHABLE = Example(
    title="scrapes that fail for some minutes while the target is still listed",
    minutes=30,
    tracks=(
        Track("up", (*flat(1, 10), *flat(0, 9), 1)),
        Track(metrics.RUN_ACTIVE, (*flat(1, 10), "stale", *flat(None, 8), 1)),
    ),
)

_COMPLETES = Example(
    title="a run whose end was reported",
    minutes=46,
    tracks=(
        Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")),
        Track(metrics.RUN_END, (*(None,) * 10, 1, 1, "stale"), {"reason": "completed"}),
        Track("up", (*flat(1, 12), "stale")),
    ),
    ends=12,
)

_GOES_ON_ELSEWHERE = Example(
    title="a run rescheduled to another node",
    minutes=46,
    tracks=(
        Track("up", _GONE_AT_TEN),
        Track(metrics.RUN_ACTIVE, (*(None,) * 11, 1), _ELSEWHERE),
        Track(metrics.STEP, (*(None,) * 11, *ramp(5600, 60, 36)), _ELSEWHERE),
        Track("up", (*(None,) * 11, 1), _ELSEWHERE),
    ),
    ends=10,
)

_ENDED_ELSEWHERE = Example(
    title="a run rescheduled to another node, where its end was reported",
    minutes=50,
    tracks=(
        Track("up", _GONE_AT_TEN),
        Track(metrics.RUN_ACTIVE, (*(None,) * 11, *flat(1, 5), 0, 0, "stale"), _ELSEWHERE),
        Track("up", (*(None,) * 11, *flat(1, 7), 0), _ELSEWHERE),
    ),
    ends=10,
)

RUN_VANISHED = Condition(
    name="MpAgentRunVanished",
    summary="A run's series stopped without a reported end.",
    meaning="The run's node agent ended together with the run, or alone and left the run "
    "unmonitored: node failure, eviction, or a killed container.",
    confirm="Check the node or pod of the last series, and the job in its scheduler.",
    remedies=(
        "Check the node's and the scheduler's events: preemption, out of memory, hardware.",
        "If the job is dead, resume it from its last checkpoint.",
        "Run the node agent as a sidecar, or start the job with mp-agent exec, so that the next "
        "end is reported.",
    ),
    why="A node agent outlives its job by linger_seconds unless its container or node dies with "
    "it, so series that stop while the run is active mean that more than the job has ended.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=unless(
                any_of(
                    Gone(metrics.RUN_ACTIVE, _WINDOW),
                    Unreachable(metrics.RUN_ACTIVE, _WINDOW, duration("unreachable_window")),
                ),
                Seen(Series(metric=metrics.RUN_ACTIVE)),
                Compare(_LAST_ACTIVE, "==", Number(0)),
            ),
            hold=duration("vanished_hold"),
            reason="The delay covers the replacement of a pod and slow service discovery; a "
            "listed target that fails gets ten minutes.",
            description="The series of run {run} stopped, and no end of the run was reported.",
        ),
    ),
    firing=(_VANISHED, _DEAD_BUT_LISTED),
    quiet=(_UNREACHABLE, _COMPLETES, _GOES_ON_ELSEWHERE, _ENDED_ELSEWHERE),
)
