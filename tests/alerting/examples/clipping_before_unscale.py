"""Examples of MpAgentClippingBeforeUnscale."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp

_EVERY_STEP = Example(
    title="clipping that comes before unscale_ at every step",
    minutes=20,
    tracks=(Track(metrics.CLIP_SCALED_STEPS, (*flat(0, 5), *ramp(60, 60, 8), 0)),),
    fires={
        Severity.WARNING: "Run demo clips gradients that are still multiplied by the loss "
        "scale, on 360 consecutive steps."
    },
    at=10,
    not_yet=(4, 14),
)

_FEW = Example(
    title="a few steps whose norm has that value by chance",
    minutes=12,
    tracks=(Track(metrics.CLIP_SCALED_STEPS, (0, 3, 0, 2, 0)),),
)

EXAMPLES = {
    "MpAgentClippingBeforeUnscale": Examples(
        firing=(_EVERY_STEP,),
        quiet=(_FEW,),
    ),
}
