"""Examples of MpAgentGradientAtFloor."""

from mp_agent.alerting.conditions.gradient_size import _FLOOR
from mp_agent.alerting.expressions.metrics import (
    GRAD_ABS_MIN,
    LAYERS_UNDERFLOWING,
    LOSS_SCALE,
    STEP,
    STEPS,
)
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp

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

EXAMPLES = {
    "MpAgentGradientAtFloor": Examples(
        firing=(_FIRES,),
        quiet=(_NO_MORE_ZEROS, _SPARSE, _BELOW, _HUNG),
    ),
}
