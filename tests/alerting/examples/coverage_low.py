"""Examples of MpAgentCoverageLow."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp

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

EXAMPLES = {
    "MpAgentCoverageLow": Examples(
        firing=(_A_NODE_IS_SILENT, _OUTLASTED),
        quiet=(_BRIEF, _HUNG, _ENDED),
    ),
}
