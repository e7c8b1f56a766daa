"""Examples of MpAgentGradientsNotReduced."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp

_NEVER = Example(
    title="a loss that is computed past the wrapper",
    minutes=20,
    tracks=(Track(metrics.REPLICA_UNREDUCED_STEPS, (*flat(0, 5), *ramp(60, 60, 8), 0)),),
    fires={
        Severity.CRITICAL: "No collective reduced the gradients of run demo for 360 consecutive "
        "steps: each rank trains a model of its own."
    },
    at=10,
    not_yet=(4, 14),
)

_AVERAGED = Example(
    title="local SGD, which averages the weights now and then",
    minutes=12,
    tracks=(Track(metrics.REPLICA_UNREDUCED_STEPS, (0,)),),
)

EXAMPLES = {
    "MpAgentGradientsNotReduced": Examples(
        firing=(_NEVER,),
        quiet=(_AVERAGED,),
    ),
}
