"""Examples of MpAgentHeadroomVanishing."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_IN_FORCE = {"scale": "in_force"}

_BOTH = Example(
    title="small gradients are lost while the largest are at the limit",
    minutes=25,
    tracks=(
        Track(metrics.GRAD_FP16_FLUSHED, (*flat(0, 5), 0.12), _IN_FORCE),
        Track(metrics.GRAD_FP16_HEADROOM, (*flat(4, 5), 0.6)),
    ),
    fires={
        Severity.INFO: "No loss scale suits run demo any more: 12% of the gradients are lost "
        "below FP16's smallest number, and the next doubling of the scale overflows."
    },
    at=20,
    not_yet=(7,),
)

_LOW_SCALE = Example(
    title="a scale that can still grow",
    minutes=20,
    tracks=(
        Track(metrics.GRAD_FP16_FLUSHED, (0.12,), _IN_FORCE),
        Track(metrics.GRAD_FP16_HEADROOM, (6,)),
    ),
)

_HIGH_SCALE = Example(
    title="a scale at its upper limit that loses next to nothing",
    minutes=20,
    tracks=(
        Track(metrics.GRAD_FP16_FLUSHED, (0.01,), _IN_FORCE),
        Track(metrics.GRAD_FP16_HEADROOM, (0.6,)),
    ),
)

_SHORT = Example(
    title="a few unusual samples",
    minutes=20,
    tracks=(
        Track(metrics.GRAD_FP16_FLUSHED, (*flat(0.12, 4), 0.01), _IN_FORCE),
        Track(metrics.GRAD_FP16_HEADROOM, (0.6,)),
    ),
)

EXAMPLES = {
    "MpAgentHeadroomVanishing": Examples(
        firing=(_BOTH,),
        quiet=(_LOW_SCALE, _HIGH_SCALE, _SHORT),
    ),
}
