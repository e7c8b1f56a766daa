"""Examples of MpAgentGradientUnderflow."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp

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

EXAMPLES = {
    "MpAgentGradientUnderflow": Examples(
        firing=(_FIFTH, _OUTLASTED),
        quiet=(_FEW, _ONE_LOOK, _BASELINE, _HUNG),
    ),
}
