"""Examples of MpAgentUpdatesLost."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_MOST = Example(
    title="most updates of BF16 weights are rounded away",
    minutes=20,
    tracks=(Track(metrics.UPDATES_LOST, (*flat(0.2, 5), 0.8)),),
    fires={
        Severity.WARNING: "80% of the updates of 16-bit weights in run demo do not change the "
        "weight: they are smaller than half the spacing of its format."
    },
    at=15,
    not_yet=(6,),
)

_SOME = Example(
    title="BF16 weights with stochastic data: half of the updates arrive",
    minutes=20,
    tracks=(Track(metrics.UPDATES_LOST, (0.45,)),),
)

_SHORT = Example(
    title="a warm-up that begins with tiny learning rates",
    minutes=20,
    tracks=(Track(metrics.UPDATES_LOST, (*flat(0.9, 4), 0.3)),),
)

EXAMPLES = {
    "MpAgentUpdatesLost": Examples(
        firing=(_MOST,),
        quiet=(_SOME, _SHORT),
    ),
}
