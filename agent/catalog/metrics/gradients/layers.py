"""Layer scope: gradients per parameter, merged over ranks, at the latest sampled step."""

from math import sqrt

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.views import LayerView


def _zero_ratio(layer: LayerView) -> Reading:
    elements = layer.values.get("elements", 0.0)
    return layer.values["zero_elements"] / elements if layer.judged and elements else None


LAYER_METRICS = (
    Metric(
        name="mp_agent.layer.grad.norm",
        unit="{norm}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        help="L2 norm of the layer's unscaled gradient before clipping.",
        read=lambda layer: sqrt(layer.values["sum_squares"]) if layer.judged else None,
    ),
    Metric(
        name="mp_agent.layer.grad.abs_max",
        unit="{gradient}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        help="Largest gradient magnitude in the layer.",
        read=lambda layer: layer.values["abs_max"] if layer.judged else None,
    ),
    Metric(
        name="mp_agent.layer.grad.abs_min",
        unit="{gradient}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        help="Smallest gradient magnitude in the layer other than zero; absent when all are zero.",
        gives_way=True,
        read=lambda layer: layer.values.get("abs_min") if layer.judged else None,
    ),
    Metric(
        name="mp_agent.layer.grad.zero",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        help="Share of the layer's gradient elements that are exactly zero.",
        read=_zero_ratio,
    ),
    Metric(
        name="mp_agent.layer.grad.nonfinite.elements",
        unit="{element}",
        kind=Kind.COUNTER,
        scope=Scope.LAYER,
        help="NaN and Inf gradient elements of the layer, in the steps that were sampled.",
        count=lambda layer: (
            layer.values.get("nan_elements", 0.0) + layer.values.get("inf_elements", 0.0)
        ),
    ),
)
