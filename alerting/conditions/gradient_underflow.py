"""MpAgentGradientUnderflow."""

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import standing
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples import Example, Track, flat, ramp
from mp_agent.alerting.predicates import Compare, unless
from mp_agent.alerting.remedies import FP16, Remedy
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.signals import Series, limit

_HOLD = duration("underflow_hold")
_SHARE = Series(metric=metrics.LAYERS_UNDERFLOWING)

_FIFTH = Example(
    title="a fifth of the layers; the alert outlasts the look that finds fewer",
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
        "than at the start. Among them: blocks.0.attention.query.weight."
    },
    at=20,
    not_yet=(12, 50),
)

_OUTLASTED = Example(
    title="a fifth of the layers for some minutes, right after",
    minutes=36,
    tracks=(Track(metrics.LAYERS_UNDERFLOWING, (*flat(0, 10), *flat(0.2, 20), 0.01)),),
    fires={
        Severity.WARNING: "The gradients of 20% of the layers of run demo have far more zeros "
        "than at the start."
    },
    at=36,
)

_FEW = Example(
    title="two layers of a hundred",
    minutes=20,
    tracks=(Track(metrics.LAYERS_UNDERFLOWING, (0.02,)),),
)

_ONE_LOOK = Example(
    title="a single look at an odd batch",
    minutes=20,
    tracks=(Track(metrics.LAYERS_UNDERFLOWING, (*flat(0, 10), *flat(0.2, 3), 0)),),
)

_BASELINE = Example(
    title="embeddings' untouched rows and ReLU's zeros, which are the layers' own baseline",
    minutes=20,
    tracks=(Track(metrics.LAYERS_UNDERFLOWING, (0,)),),
)

_HUNG = Example(
    title="a run that hung after a single look at an odd batch",
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
    meaning="A growing part of the gradient is lost before the optimizer sees it: the small "
    "values, of which most layers have the most.",
    confirm="mp_agent_layers_underflowing_ratio, and mp_agent_layer_grad_zero_ratio of the layers "
    "that mp_agent_underflowing_layer_info names.",
    remedies=(
        Remedy(
            "Use a larger loss scale: raise growth_factor or lower growth_interval if GradScaler "
            "has room, which mp_agent_grad_fp16_headroom shows.",
            FP16,
        ),
        Remedy("Train in BF16, whose smallest numbers are those of FP32.", FP16),
        "Add normalisation and residual paths, and check for frozen or detached branches.",
    ),
    why="FP16 knows nothing between zero and 6e-8: a larger scale moves gradients up from there, "
    "and BF16 has no such gap.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=unless(Compare(_SHARE, ">", limit("underflow_layers")), standing(_HOLD)),
            hold=_HOLD,
            keep=duration("layer_keep"),
            description="The gradients of {value|percent} of the layers of run {run} have far more "
            "zeros than at the start.{mp_agent_underflowing_layer_info| Among them: |layer}",
            reason="Several looks must see it, since a batch can be odd; and it outlasts some, "
            "between which layers come and go.",
        ),
    ),
    firing=(_FIFTH, _OUTLASTED),
    quiet=(_FEW, _ONE_LOOK, _BASELINE, _HUNG),
)
