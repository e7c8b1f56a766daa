"""Examples of MpAgentLayerGradientExplosion."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_NAMED = (
    "1 layer(s) of run demo had a gradient norm of more than <layer_growth> times their usual one "
    "in the last <layer_dead_samples> samples, while most layers had not."
)

_ONE_LAYER = Example(
    title="one layer that explodes while the norm of the whole model stays small",
    minutes=46,
    tracks=(
        Track(metrics.LAYERS_EXPLODING, (*flat(0, 10), *flat(1, 20), 0)),
        Track(
            metrics.EXPLODING_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "blocks.4.attention.out.weight"},
        ),
    ),
    fires={Severity.WARNING: f"{_NAMED} Among them: blocks.4.attention.out.weight."},
    at=29,
    not_yet=(9, 45),
)

_OUTLASTED = Example(
    title="a layer that exploded for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(metrics.LAYERS_EXPLODING, (*flat(0, 10), *flat(1, 20), 0)),),
    fires={Severity.WARNING: _NAMED},
    at=35,
)

_NONE = Example(
    title="layers that all grow, which are not counted",
    minutes=15,
    tracks=(Track(metrics.LAYERS_EXPLODING, (0,)),),
)

EXAMPLES = {
    "MpAgentLayerGradientExplosion": Examples(
        firing=(_ONE_LAYER, _OUTLASTED),
        quiet=(_NONE,),
    ),
}
