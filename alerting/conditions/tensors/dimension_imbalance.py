"""MpAgentDimensionImbalance."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare
from mp_agent.alerting.expressions.signals import Series, limit
from mp_agent.alerting.severity import Severity

_TENSOR = {"tensor": "inputs"}
_IMBALANCE = Series(metric=metrics.TENSOR_SLICE_IMBALANCE, keep=("tensor",))

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

DIMENSION_IMBALANCE = Condition(
    name="MpAgentDimensionImbalance",
    summary="Slices of a tensor differ in range by orders of magnitude.",
    meaning="Where slices of such ranges are added or share a loss scale, 16 bits keep little or "
    "nothing of the small ones: those features are hardly learned.",
    confirm="mp_agent_tensor_slice_imbalance by tensor; mp_agent_tensor_worst_slice is the index "
    "of the slice at fault along the dimension that the script watches.",
    remedies=(
        "Standardize each slice by itself (mean 0, standard deviation 1), in the data or by a "
        "normalization layer.",
        "Reduce in FP32, and slices of different meaning one by one.",
    ),
    why="FP16 keeps 11 significant bits and BF16 8: of two numbers whose ratio is above 1e4 a sum "
    "keeps the larger one only. Judged only of tensors that the script watches by "
    "mp_agent.watch_tensor with dim.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(_IMBALANCE, ">", limit("dimension_imbalance")),
            hold=duration("tensor_hold"),
            description="In tensor {tensor} of run {run}, the largest range of a slice along the "
            "watched dimension is {value|number} times the smallest."
            "{mp_agent_imbalanced_tensor_info| Worst of all is |tensor slice}",
            reason="The delay spares a single unusual batch.",
        ),
    ),
    firing=(_RAW_FEATURE,),
    quiet=(_STANDARDIZED, _NOT_WATCHED),
)
