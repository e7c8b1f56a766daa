"""Examples of MpAgentRunFailed."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, Value, flat


def _end(minute: int, reason: str, seen_for: int = 2) -> Track:
    values: tuple[Value, ...] = (*(None,) * minute, *flat(1, seen_for), "stale")
    return Track(metrics.RUN_END, values, {"reason": reason})


_EXCEPTION = Example(
    title="an exception ends the run, which lingers for two minutes",
    minutes=26,
    tracks=(Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")), _end(10, "failed")),
    ends=12,
    fires={Severity.CRITICAL: "Run demo ended without completing: failed."},
    labels={"reason": "failed"},
    at=25,
    not_yet=(10,),
)

_KILLED = Example(
    title="all ranks are killed",
    minutes=14,
    tracks=(Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")), _end(10, "killed")),
    ends=12,
    fires={Severity.CRITICAL: "Run demo ended without completing: killed."},
    labels={"reason": "killed"},
    at=13,
    not_yet=(10,),
)

_BROUGHT_BACK = Example(
    title="a run that is restarted ten minutes after it failed",
    minutes=24,
    tracks=(
        Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale", *flat(None, 7), 1)),
        _end(10, "failed"),
    ),
    fires={Severity.CRITICAL: "Run demo ended without completing: failed."},
    labels={"reason": "failed"},
    at=19,
    not_yet=(10, 20, 24),
)

_NAME_OF_COMPLETED = Example(
    title="a run that fails under the name of one that completed an hour before",
    minutes=17,
    tracks=(
        Track(metrics.RUN_ACTIVE, (0, 0, "stale", None, *flat(1, 6), 0, 0, "stale")),
        _end(0, "completed"),
        _end(10, "failed"),
    ),
    ends=12,
    fires={Severity.CRITICAL: "Run demo ended without completing: failed."},
    labels={"reason": "failed"},
    at=13,
    not_yet=(10,),
)

_COMPLETES = Example(
    title="a run that completes",
    minutes=22,
    tracks=(Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")), _end(10, "completed")),
    ends=12,
)

_RESTARTED = Example(
    title="an attempt that fails, and a launcher that starts the next one a minute later",
    minutes=22,
    tracks=(Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 1)), _end(10, "failed", 1)),
)

_RESTARTED_AND_DONE = Example(
    title="an attempt that fails, and a short next attempt that completes",
    minutes=22,
    tracks=(
        Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 1, 0, 0, "stale")),
        _end(10, "failed", 1),
        _end(12, "completed"),
    ),
    ends=14,
)

EXAMPLES = {
    "MpAgentRunFailed": Examples(
        firing=(_EXCEPTION, _KILLED, _BROUGHT_BACK, _NAME_OF_COMPLETED),
        quiet=(_COMPLETES, _RESTARTED, _RESTARTED_AND_DONE),
    ),
}
