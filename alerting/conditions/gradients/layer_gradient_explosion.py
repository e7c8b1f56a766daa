"""MpAgentLayerGradientExplosion."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.signals import Series
from mp_agent.alerting.severity import Severity

_EXPLODING = Series(metric=metrics.LAYERS_EXPLODING)
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

LAYER_GRADIENT_EXPLOSION = Condition(
    name="MpAgentLayerGradientExplosion",
    summary="The gradient of a layer is exploding.",
    meaning="The layer dominates each update, or what clipping leaves of it: the others hardly "
    "learn, and the layer's weights leave their working range.",
    confirm="mp_agent_exploding_layer_info names the layers; plot their "
    "mp_agent_layer_grad_norm together with mp_agent_grad_norm.",
    remedies=(
        "Check the layer's inputs and weights: a missing normalization before it, or weights "
        "that have grown, are the usual causes.",
        "Use a lower learning rate or separate clipping for the layer until the cause is found.",
    ),
    why="The norm of the whole model hides a layer whose own gradient is small compared with "
    "the sum; relative to its own history, its growth is visible long before the sum grows.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_EXPLODING),
            keep=duration("layer_keep"),
            description="{value|count} layer(s) of run {run} had a gradient norm of more than "
            "<layer_growth> times their usual one in the last <layer_dead_samples> samples, while "
            "most layers had not.{mp_agent_exploding_layer_info| Among them: |layer}",
            reason="No delay: the condition already requires consecutive samples; the alert "
            "lasts beyond some samples, between which the layers vary.",
        ),
    ),
    firing=(_ONE_LAYER, _OUTLASTED),
    quiet=(_NONE,),
)
