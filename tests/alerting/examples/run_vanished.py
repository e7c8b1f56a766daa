"""Examples of MpAgentRunVanished."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, Value, flat, ramp

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

EXAMPLES = {
    "MpAgentRunVanished": Examples(
        firing=(_VANISHED, _DEAD_BUT_LISTED),
        quiet=(_UNREACHABLE, _COMPLETES, _GOES_ON_ELSEWHERE, _ENDED_ELSEWHERE),
    ),
}
