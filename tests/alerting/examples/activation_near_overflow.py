"""Examples of MpAgentActivationNearOverflow."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_SOME = Example(
    title="some elements close to the largest number of FP16, on one sampled step",
    minutes=26,
    tracks=(Track(metrics.ACTIVATION_NEAR_OVERFLOW, (*flat(0, 10), 7)),),
    fires={
        Severity.WARNING: "7 element(s) of FP16 outputs of run demo were above "
        "<fp16_near_overflow> on the steps that were sampled in the last <incident_window>."
    },
    at=15,
    not_yet=(9, 25),
)

_BFLOAT16 = Example(
    title="larger outputs in BF16 or FP32, which are not counted",
    minutes=15,
    tracks=(Track(metrics.ACTIVATION_NEAR_OVERFLOW, (0,)),),
)

_OFF = Example(
    title="a run that does not measure outputs",
    minutes=15,
    without=(metrics.ACTIVATION_NEAR_OVERFLOW,),
)

EXAMPLES = {
    "MpAgentActivationNearOverflow": Examples(
        firing=(_SOME,),
        quiet=(_BFLOAT16, _OFF),
    ),
}
