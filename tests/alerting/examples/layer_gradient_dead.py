"""Examples of MpAgentLayerGradientDead."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat


def _named(*layers: str) -> tuple[Track, ...]:
    return tuple(
        Track(metrics.DEAD_LAYER, (*flat(None, 10), *flat(1, 20), "stale"), {"layer": layer})
        for layer in layers
    )


_TWO_LAYERS = Example(
    title="two layers with dead gradients; the alert lasts beyond a sample that finds them alive",
    minutes=46,
    tracks=(
        Track(metrics.LAYERS_DEAD, (*flat(0, 10), *flat(2, 20), 0)),
        *_named("blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"),
    ),
    fires={
        Severity.WARNING: "2 layer(s) of run demo had almost no gradient in the last "
        "<layer_dead_samples> samples. Among them: blocks.0.mlp.up.weight, "
        "blocks.1.mlp.up.weight."
    },
    at=29,
    not_yet=(9, 45),
)

_OUTLASTED = Example(
    title="a layer that was dead for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(metrics.LAYERS_DEAD, (*flat(0, 10), *flat(1, 20), 0)),),
    fires={
        Severity.WARNING: "1 layer(s) of run demo had almost no gradient in the last "
        "<layer_dead_samples> samples."
    },
    at=35,
)

_NONE = Example(
    title="frozen, unused and idle parameters, which are not counted",
    minutes=15,
    tracks=(Track(metrics.LAYERS_DEAD, (0,)),),
)

_NOT_LOOKED_AT = Example(
    title="a run whose layers were never sampled", minutes=15, without=(metrics.LAYERS_DEAD,)
)

EXAMPLES = {
    "MpAgentLayerGradientDead": Examples(
        firing=(_TWO_LAYERS, _OUTLASTED),
        quiet=(_NONE, _NOT_LOOKED_AT),
    ),
}
