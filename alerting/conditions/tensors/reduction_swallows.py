"""MpAgentReductionSwallows."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare
from mp_agent.alerting.expressions.signals import Series, limit
from mp_agent.alerting.severity import Severity

_TENSOR = {"tensor": "token losses"}
_SWALLOWED = Series(metric=metrics.TENSOR_REDUCTION_SWALLOWED, keep=("tensor",))

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

REDUCTION_SWALLOWS = Condition(
    name="MpAgentReductionSwallows",
    summary="A sum in 16 bits loses small terms.",
    meaning="Terms smaller than half the spacing of the format at the sum so far do not change it: "
    "the loss, the mean or the norm that is made of them is too small, and so are its gradients.",
    confirm="mp_agent_tensor_reduction_swallowed_ratio by tensor; mp_agent_tensor_dynamic_range "
    "shows how far its largest and smallest terms are apart.",
    remedies=(
        "Sum in FP32: tensor.float().sum(), or sum(dtype=torch.float32), also for means and norms.",
        "Sum in blocks and add those up, where the terms must stay in 16 bits.",
    ),
    why="FP16 keeps 11 significant bits and BF16 8: at a sum of 2048, or of 256, a term of 1 is "
    "half the spacing. FP32 keeps 24. Judged only of tensors that the script watches by "
    "mp_agent.watch_tensor with reduction=True.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(_SWALLOWED, ">", limit("reduction_swallowed")),
            hold=duration("tensor_hold"),
            description="A sum of tensor {tensor} of run {run} in its own dtype loses "
            "{value|percent} of the terms: they are smaller than half the spacing of the format at "
            "the sum.",
            reason="The delay spares a single unusual batch.",
        ),
    ),
    firing=(_LONG_SUM,),
    quiet=(_ROUNDING, _NO_REDUCTION),
)
