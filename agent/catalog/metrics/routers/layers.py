"""Routers of mixtures of experts, of each layer, at the latest step that was sampled."""

from collections.abc import Callable

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.catalog.metrics.routers.quantities import Quantity, dropped, entropy, unused_experts
from mp_agent.records.columns import ROUTERS
from mp_agent.records.views import LayerView


def _of_layer(quantity: Quantity) -> Callable[[LayerView], Reading]:
    return lambda layer: quantity(layer.values) if layer.judged else None


ROUTER_LAYER_METRICS = (
    Metric(
        name="mp_agent.layer.router.load.max",
        unit="{factor}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=ROUTERS.name,
        help="Tokens that the most loaded expert of the layer is chosen for, divided by the mean "
        "over its experts (1 is even), before any is dropped; on the rank where it is largest.",
        read=_of_layer(lambda values: values.get("load_max")),
    ),
    Metric(
        name="mp_agent.layer.router.entropy",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=ROUTERS.name,
        help="Mean entropy of softmax over a token's router logits, divided by the logarithm of "
        "the number of experts: 1 is undecided, 0 a single expert.",
        read=_of_layer(entropy),
    ),
    Metric(
        name="mp_agent.layer.router.unused_experts",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=ROUTERS.name,
        help="Share of the layer's experts that no token of a rank's micro-batch was routed to, on "
        "average over the ranks.",
        read=_of_layer(unused_experts),
    ),
    Metric(
        name="mp_agent.layer.router.logit.abs_max",
        unit="{logit}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=ROUTERS.name,
        help="Largest magnitude of a finite router logit of the layer.",
        read=_of_layer(lambda values: values.get("logit_abs_max")),
    ),
    Metric(
        name="mp_agent.layer.router.dropped",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=ROUTERS.name,
        help="Share of the choices of an expert by a token that were dropped, since the expert's "
        "capacity was full; absent where the router shows none.",
        read=_of_layer(dropped),
    ),
)
