"""Examples of MpAgentAdamEpsilonUnsafe."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_TEXT = (
    "Adam's epsilon does not suit the second moments of run demo: it is either above the root of "
    "most of them, or below the smallest number of their format."
)

_SMALL_MOMENTS = Example(
    title="second moments whose root is below epsilon in most elements",
    minutes=20,
    tracks=(Track(metrics.ADAM_BELOW_EPSILON, (*flat(0.1, 5), 0.7)),),
    fires={Severity.WARNING: _TEXT},
    at=15,
    not_yet=(6,),
)

_FP16_STATE = Example(
    title="state in FP16 with an epsilon of 1e-8",
    minutes=20,
    tracks=(Track(metrics.ADAM_EPSILON_LOST, (1,)),),
    fires={Severity.WARNING: _TEXT},
    at=10,
    not_yet=(3,),
)

_SOME = Example(
    title="a minority of elements with tiny second moments, such as of rare tokens",
    minutes=20,
    tracks=(Track(metrics.ADAM_BELOW_EPSILON, (0.4,)),),
)

_ONE_LOOK = Example(
    title="tiny gradients in the first samples",
    minutes=20,
    tracks=(Track(metrics.ADAM_BELOW_EPSILON, (*flat(0.9, 4), 0.02)),),
)

EXAMPLES = {
    "MpAgentAdamEpsilonUnsafe": Examples(
        firing=(_SMALL_MOMENTS, _FP16_STATE),
        quiet=(_SOME, _ONE_LOOK),
    ),
}
