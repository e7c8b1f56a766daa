"""Examples of MpAgentReductionSwallows."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_TENSOR = {"tensor": "token losses"}

_LONG_SUM = Example(
    title="a mean over a long sequence in FP16, from a longer batch on",
    minutes=20,
    tracks=(Track(metrics.TENSOR_REDUCTION_SWALLOWED, (*flat(0.001, 5), 0.34), _TENSOR),),
    fires={
        Severity.WARNING: "A sum of tensor token losses of run demo in its own dtype loses 34% of "
        "the terms: they are smaller than half the spacing of the format at the sum."
    },
    labels=_TENSOR,
    at=15,
    not_yet=(6,),
)

_ROUNDING = Example(
    title="a short sum that loses less than a hundredth",
    minutes=20,
    tracks=(Track(metrics.TENSOR_REDUCTION_SWALLOWED, (0.008,), _TENSOR),),
)

_NO_REDUCTION = Example(
    title="large logits in BF16 that are watched, and that nothing sums",
    minutes=20,
    tracks=(Track(metrics.TENSOR_SWALLOWED, (0.9,), {"tensor": "logits"}),),
    without=(metrics.TENSOR_REDUCTION_SWALLOWED,),
)

EXAMPLES = {
    "MpAgentReductionSwallows": Examples(
        firing=(_LONG_SUM,),
        quiet=(_ROUNDING, _NO_REDUCTION),
    ),
}
