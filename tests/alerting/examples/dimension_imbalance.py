"""Examples of MpAgentDimensionImbalance."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_TENSOR = {"tensor": "inputs"}

_RAW_FEATURE = Example(
    title="a feature that is not standardized among others that are",
    minutes=20,
    tracks=(
        Track(metrics.TENSOR_SLICE_IMBALANCE, (*flat(8, 5), 52000), _TENSOR),
        Track(metrics.IMBALANCED_TENSOR, (*flat(None, 5), 1), {**_TENSOR, "slice": "3"}),
    ),
    fires={
        Severity.WARNING: "In tensor inputs of run demo, the largest range of a slice along the "
        "watched dimension is 5.2e+04 times the smallest. Worst of all is tensor inputs, slice 3."
    },
    labels=_TENSOR,
    at=15,
    not_yet=(6,),
)

_STANDARDIZED = Example(
    title="features of similar ranges",
    minutes=20,
    tracks=(Track(metrics.TENSOR_SLICE_IMBALANCE, (40,), _TENSOR),),
)

_NOT_WATCHED = Example(
    title="a script that watches no tensor",
    minutes=20,
    without=(metrics.TENSOR_SLICE_IMBALANCE,),
)

EXAMPLES = {
    "MpAgentDimensionImbalance": Examples(
        firing=(_RAW_FEATURE,),
        quiet=(_STANDARDIZED, _NOT_WATCHED),
    ),
}
