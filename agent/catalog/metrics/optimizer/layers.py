"""Layer scope: weights and updates per parameter, merged over ranks, at the latest sampled step."""

from collections.abc import Callable

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.catalog.metrics.optimizer.quantities import (
    Quantity,
    lost_updates,
    moment_rms,
    relative_update,
    weight_norm,
)
from mp_agent.records.columns import OPTIMIZER
from mp_agent.records.views import LayerView


def _of_layer(quantity: Quantity) -> Callable[[LayerView], Reading]:
    return lambda layer: quantity(layer.values) if layer.judged else None


UPDATE_LAYER_METRICS = (
    Metric(
        name="mp_agent.layer.weight.norm",
        unit="{norm}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=OPTIMIZER.name,
        help="L2 norm of the layer's weights after the optimizer's step.",
        read=_of_layer(weight_norm),
    ),
    Metric(
        name="mp_agent.layer.update.relative",
        unit="{factor}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=OPTIMIZER.name,
        help="L2 norm of what the step added to the layer's weights, divided by their norm before; "
        "absent while they are all zero.",
        read=_of_layer(relative_update),
    ),
    Metric(
        name="mp_agent.layer.updates.lost",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=OPTIMIZER.name,
        gives_way=True,
        help="Share of the layer's updates that were rounded away; absent for weights of more "
        "than 16 bits.",
        read=_of_layer(lost_updates),
    ),
    Metric(
        name="mp_agent.layer.moment.rms",
        unit="{factor}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=OPTIMIZER.name,
        help="Root of the mean of the layer's squared gradient divided by Adam's second moment.",
        read=_of_layer(moment_rms),
    ),
    Metric(
        name="mp_agent.layer.learning_rate",
        unit="{rate}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=OPTIMIZER.name,
        gives_way=True,
        help="Learning rate of the layer's parameter group.",
        read=_of_layer(lambda values: values.get("learning_rate")),
    ),
)
