"""MpAgentLayerGradientDead."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare
from mp_agent.alerting.expressions.signals import Number, Series
from mp_agent.alerting.remedies import FP16, Remedy
from mp_agent.alerting.severity import Severity

_DEAD = Series(metric=metrics.LAYERS_DEAD)


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

LAYER_GRADIENT_DEAD = Condition(
    name="MpAgentLayerGradientDead",
    summary="A layer's gradient is dead.",
    meaning="The layer no longer learns, nor do the layers before it on its path; the rest of "
    "the model continues to train.",
    confirm="mp_agent_dead_layer_info names the layers; plot their mp_agent_layer_grad_abs_max.",
    remedies=(
        Remedy("Use a larger loss scale, or BF16, if the gradient underflows FP16.", FP16),
        "Add normalization or a residual path around the layer, and check its activations: a "
        "ReLU that is never above zero passes no gradient.",
        "Check whether the layer was frozen or detached on purpose.",
    ),
    why="A gradient of 1e-10 is too small for an optimizer in 16 or 32 bits to change the "
    "weights; it must be scaled up, or take another path.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(_DEAD, ">", Number(0)),
            keep=duration("layer_keep"),
            description="{value|count} layer(s) of run {run} had almost no gradient in the last "
            "<layer_dead_samples> samples.{mp_agent_dead_layer_info| Among them: |layer}",
            reason="No delay: the condition already requires consecutive samples; the alert "
            "lasts beyond some samples, between which the layers vary.",
        ),
    ),
    firing=(_TWO_LAYERS, _OUTLASTED),
    quiet=(_NONE, _NOT_LOOKED_AT),
)
