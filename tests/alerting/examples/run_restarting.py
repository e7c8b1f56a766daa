"""Examples of MpAgentRunRestarting."""

from mp_agent.alerting.conditions.run import _DESCRIPTION
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, Value, flat


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

EXAMPLES = {
    "MpAgentRunRestarting": Examples(
        firing=(_CRASH_LOOP, _WITHOUT_MEMORY),
        quiet=(_PREEMPTED, _LONG_AGO),
    ),
}
