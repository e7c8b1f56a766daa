"""Examples of MpAgentRankStraggler."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp

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

EXAMPLES = {
    "MpAgentRankStraggler": Examples(
        firing=(_SLOW_RANK,),
        quiet=(_BRIEF, _WITHIN, _CHEAP, _UNKNOWN, _HUNG),
    ),
}
