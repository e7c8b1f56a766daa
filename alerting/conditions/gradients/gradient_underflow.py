"""MpAgentGradientUnderflow."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import standing
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, unless
from mp_agent.alerting.expressions.signals import Series, limit
from mp_agent.alerting.remedies import FP16, Remedy
from mp_agent.alerting.severity import Severity

_HOLD = duration("underflow_hold")
_SHARE = Series(metric=metrics.LAYERS_UNDERFLOWING)

_FIFTH = Example(
    title="a fifth of the layers; the alert lasts beyond a sample with fewer",
    minutes=52,
    tracks=(
        Track(metrics.LAYERS_UNDERFLOWING, (*flat(0, 10), *flat(0.2, 20), 0.01)),
        Track(
            metrics.UNDERFLOWING_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "blocks.0.attention.query.weight"},
        ),
    ),
    fires={
        Severity.WARNING: "The gradients of 20% of the layers of run demo have far more zeros "
        "than at the start, or lie below FP16's smallest number. Among them: "
        "blocks.0.attention.query.weight."
    },
    at=20,
    not_yet=(12, 50),
)

_OUTLASTED = Example(
    title="a fifth of the layers for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(metrics.LAYERS_UNDERFLOWING, (*flat(0, 10), *flat(0.2, 20), 0.01)),),
    fires={
        Severity.WARNING: "The gradients of 20% of the layers of run demo have far more zeros "
        "than at the start, or lie below FP16's smallest number."
    },
    at=36,
)

_FEW = Example(
    title="two layers of a hundred",
    minutes=20,
    tracks=(Track(metrics.LAYERS_UNDERFLOWING, (0.02,)),),
)

_ONE_LOOK = Example(
    title="a single sample of an unusual batch",
    minutes=20,
    tracks=(Track(metrics.LAYERS_UNDERFLOWING, (*flat(0, 10), *flat(0.2, 3), 0)),),
)

_BASELINE = Example(
    title="unused embedding rows and ReLU zeros, which are in the layers' baseline",
    minutes=20,
    tracks=(Track(metrics.LAYERS_UNDERFLOWING, (0,)),),
)

_HUNG = Example(
    title="a run that hung after a single sample of an unusual batch",
    minutes=18,
    tracks=(
        Track(metrics.LAYERS_UNDERFLOWING, (*flat(0, 9), 0.2)),
        Track(metrics.STEP, ramp(5000, 60, 10)),
        Track(metrics.STEPS, ramp(5000, 60, 10)),
    ),
)

GRADIENT_UNDERFLOW = Condition(
    name="MpAgentGradientUnderflow",
    summary="Gradients underflow to zero in many layers.",
    meaning="A growing part of the gradient is lost before it reaches the optimizer: the small "
    "values, which are the majority in most layers.",
    confirm="mp_agent_layers_underflowing_ratio, and mp_agent_layer_grad_zero_ratio of the layers "
    "that mp_agent_underflowing_layer_info names.",
    remedies=(
        Remedy(
            "Use a larger loss scale: raise growth_factor or lower growth_interval if "
            "mp_agent_grad_fp16_headroom shows that there is headroom.",
            FP16,
        ),
        Remedy("Train in BF16, which has the exponent range of FP32.", FP16),
        "Add normalization and residual paths, and check for frozen or detached branches.",
    ),
    why="FP16 has no values between zero and 6e-8: a larger scale moves gradients above that "
    "gap, and BF16 does not have it.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=unless(Compare(_SHARE, ">", limit("underflow_layers")), standing(_HOLD)),
            hold=_HOLD,
            keep=duration("layer_keep"),
            description="The gradients of {value|percent} of the layers of run {run} have far more "
            "zeros than at the start, or lie below FP16's smallest number."
            "{mp_agent_underflowing_layer_info| Among them: |layer}",
            reason="The delay covers several samples, because a single batch can be unusual; "
            "the alert lasts beyond some samples, between which the layers vary.",
        ),
    ),
    firing=(_FIFTH, _OUTLASTED),
    quiet=(_FEW, _ONE_LOOK, _BASELINE, _HUNG),
)
