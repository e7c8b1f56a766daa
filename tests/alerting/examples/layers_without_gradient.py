"""Examples of MpAgentLayersWithoutGradient."""

from mp_agent.alerting.conditions.gradient_layers import _LAYERS_WITHOUT_GRADIENT_TEXT, _NAMES
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_FILLED = _LAYERS_WITHOUT_GRADIENT_TEXT.removesuffix(_NAMES).replace("{run}", "demo")


def _named(*layers: str) -> tuple[Track, ...]:
    return tuple(
        Track(metrics.LAYER_WITHOUT_GRADIENT, (*flat(None, 5), 1), {"layer": layer})
        for layer in layers
    )


_ADAPTERS = Example(
    title="adapters behind reentrant checkpointing, whose inputs need no gradient",
    minutes=15,
    tracks=(
        Track(metrics.LAYERS_WITHOUT_GRADIENT, (*flat(None, 5), 0.8)),
        *_named("blocks.0.lora_A.weight", "blocks.0.lora_B.weight"),
    ),
    fires={
        Severity.WARNING: _FILLED.replace("{value|percent}", "80%")
        + " Among them: blocks.0.lora_A.weight, blocks.0.lora_B.weight."
    },
    at=8,
    not_yet=(4,),
)

_COPY = Example(
    title="an optimizer that holds the parameters of another copy of the model",
    minutes=15,
    tracks=(Track(metrics.LAYERS_WITHOUT_GRADIENT, (*flat(None, 5), 1)),),
    fires={Severity.WARNING: _FILLED.replace("{value|percent}", "100%")},
    at=8,
    not_yet=(4,),
)

_HEAD = Example(
    title="a head that no step uses",
    minutes=15,
    tracks=(
        Track(metrics.LAYERS_WITHOUT_GRADIENT, (*flat(None, 5), 0.04)),
        *_named("head.auxiliary.weight"),
    ),
    fires={
        Severity.INFO: _FILLED.replace("{value|percent}", "4%")
        + " Among them: head.auxiliary.weight."
    },
    at=8,
    not_yet=(4,),
)

_ALL = Example(
    title="frozen parameters and idle experts, which are not counted",
    minutes=15,
    tracks=(Track(metrics.LAYERS_WITHOUT_GRADIENT, (0,)),),
)

_NOT_LOOKED_AT = Example(
    title="a run whose layers were never sampled",
    minutes=15,
    without=(metrics.LAYERS_WITHOUT_GRADIENT,),
)

EXAMPLES = {
    "MpAgentLayersWithoutGradient": Examples(
        firing=(_ADAPTERS, _COPY, _HEAD),
        quiet=(_ALL, _NOT_LOOKED_AT),
    ),
}
