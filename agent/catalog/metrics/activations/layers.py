"""Layer scope: the output of each module, at the latest step that was sampled."""

from collections.abc import Callable

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.catalog.metrics.activations.moments import (
    Row,
    mean,
    nonfinite_elements,
    standard_deviation,
    zero_share,
)
from mp_agent.records.columns import ACTIVATIONS
from mp_agent.records.views import LayerView


def _of_layer(read: Callable[[Row], float | None]) -> Callable[[LayerView], Reading]:
    def read_layer(layer: LayerView) -> Reading:
        return read(layer.values) if layer.judged else None

    return read_layer


ACTIVATION_LAYER_METRICS = (
    Metric(
        name="mp_agent.layer.activation.abs_max",
        unit="{activation}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=ACTIVATIONS.name,
        help="Largest finite magnitude in the module's output, in the first forward pass of a "
        "sampled step.",
        read=_of_layer(lambda row: row.get("abs_max")),
    ),
    Metric(
        name="mp_agent.layer.activation.mean",
        unit="{activation}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=ACTIVATIONS.name,
        help="Mean of the finite elements of the module's output.",
        gives_way=True,
        read=_of_layer(mean),
    ),
    Metric(
        name="mp_agent.layer.activation.std",
        unit="{activation}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=ACTIVATIONS.name,
        help="Standard deviation of the finite elements of the module's output.",
        read=_of_layer(standard_deviation),
    ),
    Metric(
        name="mp_agent.layer.activation.zero",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=ACTIVATIONS.name,
        help="Share of the elements of the module's output that are exactly zero.",
        gives_way=True,
        read=_of_layer(zero_share),
    ),
    Metric(
        name="mp_agent.layer.activation.nonfinite.elements",
        unit="{element}",
        kind=Kind.COUNTER,
        scope=Scope.LAYER,
        family=ACTIVATIONS.name,
        help="NaN and Inf elements in the module's output, in the steps that were sampled.",
        count=lambda layer: nonfinite_elements(layer.values),
    ),
)
