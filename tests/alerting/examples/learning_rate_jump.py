"""Examples of MpAgentLearningRateJump."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_JUMP = Example(
    title="a learning rate that suddenly grows three thousandfold",
    minutes=26,
    tracks=(Track(metrics.LEARNING_RATE_JUMPS, (*flat(0, 10), 1)),),
    fires={
        Severity.WARNING: "The learning rate of run demo rose to <learning_rate_jump> times its "
        "highest value so far, or more, within the last <incident_window>."
    },
    at=12,
    not_yet=(9, 25),
)

_WARM_UP = Example(
    title="a warm-up, whose rises are not counted",
    minutes=12,
    tracks=(Track(metrics.LEARNING_RATE_JUMPS, (0,)),),
)

EXAMPLES = {
    "MpAgentLearningRateJump": Examples(
        firing=(_JUMP,),
        quiet=(_WARM_UP,),
    ),
}
