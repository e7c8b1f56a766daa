"""MpAgentGradientAtFloor."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import standing
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions.metrics import (
    GRAD_ABS_MIN,
    LAYERS_UNDERFLOWING,
    LOSS_SCALE,
    STEP,
    STEPS,
)
from mp_agent.alerting.expressions.predicates import Compare, all_of, unless
from mp_agent.alerting.expressions.signals import Number, Series
from mp_agent.alerting.remedies import FP16, Remedy
from mp_agent.alerting.severity import Severity

_HOLD = duration("underflow_hold")
_FLOOR = 2.0**-24
"""FP16's smallest number above zero."""
_SMALLEST = Series(metric=GRAD_ABS_MIN) * Series(metric=LOSS_SCALE)
_AT_FLOOR = all_of(
    Compare(_SMALLEST, ">=", Number(0.999 * _FLOOR)),
    Compare(_SMALLEST, "<=", Number(1.001 * _FLOOR)),
)

_FIRES = Example(
    title="gradients that shrink until the smallest are FP16's smallest number",
    minutes=20,
    tracks=(
        Track(LOSS_SCALE, (65536,)),
        Track(GRAD_ABS_MIN, (*flat(3e-11, 4), _FLOOR / 65536)),
        Track(LAYERS_UNDERFLOWING, (*flat(0, 4), 0.02)),
    ),
    fires={
        Severity.INFO: "The smallest gradients of run demo lie at FP16's smallest number, and some "
        "layers have far more zeros than at the start: what was smaller was lost."
    },
    at=15,
    not_yet=(7,),
)

_NO_MORE_ZEROS = Example(
    title="smallest gradients at FP16's smallest number, and no more zeros than at the start",
    minutes=12,
    tracks=(
        Track(LOSS_SCALE, (65536,)),
        Track(GRAD_ABS_MIN, (_FLOOR / 65536,)),
        Track(LAYERS_UNDERFLOWING, (0,)),
    ),
)

_SPARSE = Example(
    title="more zeros, but smallest gradients well above FP16's smallest number: sparsity",
    minutes=12,
    tracks=(
        Track(LOSS_SCALE, (65536,)),
        Track(GRAD_ABS_MIN, (1e-9,)),
        Track(LAYERS_UNDERFLOWING, (0.02,)),
    ),
)

_BELOW = Example(
    title="smallest gradients below FP16's smallest number: those of layers that run in FP32",
    minutes=12,
    tracks=(
        Track(LOSS_SCALE, (65536,)),
        Track(GRAD_ABS_MIN, (1e-15,)),
        Track(LAYERS_UNDERFLOWING, (0.02,)),
    ),
)

_HUNG = Example(
    title="a run that hung after a single look at an odd batch",
    minutes=18,
    tracks=(
        Track(LOSS_SCALE, (65536,)),
        Track(GRAD_ABS_MIN, (_FLOOR / 65536,)),
        Track(LAYERS_UNDERFLOWING, (*flat(0, 9), 0.02)),
        Track(STEP, ramp(5000, 60, 10)),
        Track(STEPS, ramp(5000, 60, 10)),
    ),
)

GRADIENT_AT_FLOOR = Condition(
    name="MpAgentGradientAtFloor",
    summary="Small gradients are lost below FP16's smallest number.",
    meaning="The new zeros in some layers are underflow, not sparsity: the smallest gradients that "
    "are left lie exactly at the smallest number of FP16.",
    confirm="mp_agent_grad_abs_min times mp_agent_loss_scale, which is 5.96e-8, and "
    "mp_agent_layer_grad_abs_min of the layers that mp_agent_underflowing_layer_info names.",
    remedies=(
        Remedy(
            "Use a larger loss scale: raise growth_factor or lower growth_interval if GradScaler "
            "has room, which mp_agent_grad_fp16_headroom shows.",
            FP16,
        ),
        Remedy("Train in BF16, whose smallest numbers are those of FP32.", FP16),
        "Divide the loss by large numbers, such as token counts, after its backward.",
    ),
    why="A larger scale moves gradients up from the gap between zero and 6e-8, and BF16 has no "
    "such gap.",
    levels=(
        Level(
            severity=Severity.INFO,
            when=unless(
                all_of(_AT_FLOOR, Compare(Series(metric=LAYERS_UNDERFLOWING), ">", Number(0))),
                standing(_HOLD),
            ),
            hold=_HOLD,
            description="The smallest gradients of run {run} lie at FP16's smallest number, and "
            "some layers have far more zeros than at the start: what was smaller was lost.",
            reason="Several looks must see it, since a batch can be odd.",
        ),
    ),
    firing=(_FIRES,),
    quiet=(_NO_MORE_ZEROS, _SPARSE, _BELOW, _HUNG),
)
