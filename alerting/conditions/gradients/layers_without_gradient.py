"""MpAgentLayersWithoutGradient."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, unless
from mp_agent.alerting.expressions.signals import Number, Series, limit
from mp_agent.alerting.severity import Severity

_SHARE = Series(metric=metrics.LAYERS_WITHOUT_GRADIENT)
_MOST = Compare(_SHARE, ">", limit("layers_without_gradient"))
_NAMES = "{mp_agent_layer_without_gradient_info| Among them: |layer}"
_TEXT = (
    "{value|percent} of the layers that the optimizer of run {run} holds, and that require "
    "gradients, have never had one." + _NAMES
)
_FILLED = _TEXT.removesuffix(_NAMES).replace("{run}", "demo")


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

LAYERS_WITHOUT_GRADIENT = Condition(
    name="MpAgentLayersWithoutGradient",
    summary="Layers that the optimizer holds get no gradient.",
    meaning="These layers keep their initial weights, while the loss may still fall by what the "
    "others learn.",
    confirm="mp_agent_layer_without_gradient_info names the layers, and "
    "mp_agent_unsupported_info parameters with gradients that no optimizer holds, if there are "
    "any. In the script, print the names of all parameters whose grad is None after backward.",
    remedies=(
        "If mp_agent_unsupported_info names gradients that no optimizer holds, create the "
        "optimizer after the model has been copied, moved and wrapped, from the parameters of the "
        "model that computes the loss.",
        "With activation checkpointing, pass use_reentrant=False, or let the input of the first "
        "block require gradients (enable_input_require_grads of transformers): the reentrant form "
        "makes no gradients where no input requires one, as behind a frozen embedding.",
        "Check that the forward pass uses the layers, and that their outputs are not detached, "
        "or computed under no_grad.",
        "Set requires_grad to False for layers that are not to be trained.",
    ),
    why="An optimizer leaves out parameters without gradient, and says nothing.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=_MOST,
            description=_TEXT,
            reason="No delay: the metric already requires untrained_steps steps.",
        ),
        Level(
            severity=Severity.INFO,
            when=unless(Compare(_SHARE, ">", Number(0)), _MOST),
            description=_TEXT,
            reason="As for the warning, which it replaces where only few layers are concerned: "
            "heads and branches that the run does not use.",
        ),
    ),
    firing=(_ADAPTERS, _COPY, _HEAD),
    quiet=(_ALL, _NOT_LOOKED_AT),
)
