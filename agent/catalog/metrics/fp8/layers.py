"""What FP8 makes of the operands of each linear layer, at the latest step that was sampled."""

from collections.abc import Callable

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.catalog.metrics.fp8.quantities import Quantity, flushed, saturated
from mp_agent.records.columns import FP8
from mp_agent.records.views import LayerView


def _of_layer(quantity: Quantity) -> Callable[[LayerView], Reading]:
    return lambda layer: quantity(layer.values) if layer.judged else None


FP8_LAYER_METRICS = (
    *(
        Metric(
            name=f"mp_agent.layer.fp8.{operand}.flushed",
            unit="1",
            kind=Kind.GAUGE,
            scope=Scope.LAYER,
            family=FP8.name,
            gives_way=True,
            help=f"Share of the non-zero elements of the layer's {what} that a cast to "
            f"{number_format} rounds to zero when the tensor is scaled by its own amax.",
            read=_of_layer(flushed(operand)),
        )
        for operand, what, number_format in (
            ("input", "input", "E4M3"),
            ("weight", "weight", "E4M3"),
            ("gradient", "output's gradient", "E5M2"),
        )
    ),
    Metric(
        name="mp_agent.layer.fp8.saturated",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=FP8.name,
        help="Share of the layer's tensors with delayed scaling whose amax was beyond the format's "
        "largest number, or not finite.",
        read=_of_layer(saturated),
    ),
    Metric(
        name="mp_agent.layer.fp8.range_used.max",
        unit="{factor}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=FP8.name,
        help="Amax times scale divided by the format's largest number, of the layer's tensor where "
        "it is largest; above 1 it was saturated.",
        read=_of_layer(lambda values: values.get("range_used_max")),
    ),
    Metric(
        name="mp_agent.layer.fp8.range_used.min",
        unit="{factor}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=FP8.name,
        gives_way=True,
        help="The same of the layer's tensor where it is smallest.",
        read=_of_layer(lambda values: values.get("range_used_min")),
    ),
    Metric(
        name="mp_agent.layer.fp8.amax",
        unit="{element}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=FP8.name,
        gives_way=True,
        help="Largest amax of the layer's tensors with delayed scaling.",
        read=_of_layer(lambda values: values.get("amax_max")),
    ),
)
