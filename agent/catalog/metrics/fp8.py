"""Metrics of FP8 operands."""

from collections.abc import Callable, Mapping

from mp_agent.catalog.metric import Reading, counter, gauge, info, layer_gauge
from mp_agent.records.columns import FP8
from mp_agent.records.health import Fp8Scaling
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import LayerView, RunView

Columns = Mapping[str, float]
Quantity = Callable[[Columns], float | None]

OPERANDS = ("input", "weight", "gradient")


def flushed(operand: str) -> Quantity:
    """Return the share of an operand's non-zero elements that a cast to FP8 rounds to zero."""

    def read(values: Columns) -> float | None:
        elements = values.get(f"{operand}_elements", 0.0)
        lost = values.get(f"{operand}_flushed_elements", 0.0)
        return lost / elements if elements > 0.0 else None

    return read


def saturated(values: Columns) -> float | None:
    """Return the share of the tensors with delayed scaling whose amax was beyond the range."""
    tensors = values.get("scaled_tensors", 0.0)
    return values.get("saturated_tensors", 0.0) / tensors if tensors > 0.0 else None


def _of_run(quantity: Callable[[Columns], Reading]) -> Callable[[RunView], Reading]:
    return lambda run: quantity(run.latest.families.get(FP8.name, {}))


def _of_scaling(read: Callable[[Fp8Scaling], Reading]) -> Callable[[RunView], Reading]:
    return lambda run: None if run.fp8 is None else read(run.fp8)


def _names(scaling: Fp8Scaling) -> Reading:
    named = {"saturated": scaling.saturated_names, "unused": scaling.unused_names}
    return {(layer, reason): 1.0 for reason, layers in named.items() for layer in layers}


def _flushed(values: Columns) -> Reading:
    return {(operand,): flushed(operand)(values) for operand in OPERANDS}


def _nonfinite(change: StepTransition) -> float:
    return change.step.families.get(FP8.name, {}).get("nonfinite_elements", 0.0)


LAYERS_FP8_MISSCALED = gauge(
    "mp_agent.layers.fp8_misscaled",
    "{layer}",
    thresholds=("fp8_range_used_high", "fp8_range_used_low", "fp8_scaling_samples"),
    help="Layers with a tensor that used more of FP8's range than the one limit, or less than "
    "the other, in several consecutive samples. Absent without delayed scaling.",
    read=_of_scaling(lambda scaling: float(scaling.misscaled)),
)
FP8_MISSCALED_LAYER = info(
    "mp_agent.fp8_misscaled_layer.info",
    labels=("layer", "reason"),
    help="A layer whose scale does not fit a tensor, and what it does to FP8's range: "
    "`saturated` or `unused`; 10 of each at most, the furthest ones first.",
    read=_of_scaling(_names),
)

LAYERS_FP8_FLUSHED = gauge(
    "mp_agent.layers.fp8_flushed",
    "{layer}",
    thresholds=("fp8_flushed", "fp8_scaling_samples"),
    help="Layers whose cast of the input or the weight to FP8, by its own amax, rounded more than "
    "the limit of it to zero in several consecutive samples. Absent where no layer casts each "
    "tensor by its own amax.",
    read=lambda run: None if run.fp8_flushing is None else float(run.fp8_flushing.flushed),
)
FP8_FLUSHED_MAX = gauge(
    "mp_agent.fp8.flushed.layer_max",
    "1",
    help="Largest share of the non-zero elements of an input or a weight that its cast to FP8 "
    "rounds to zero, of the layers that cast each tensor by its own amax.",
    read=lambda run: None if run.fp8_flushing is None else run.fp8_flushing.share,
)
FP8_FLUSHED_LAYER = info(
    "mp_agent.fp8_flushed_layer.info",
    labels=("layer", "operand"),
    help="A layer whose cast to FP8 rounds more than the limit of its `input` or `weight` to zero; "
    "10 at most.",
    read=lambda run: dict.fromkeys(run.fp8_flushing.names, 1.0) if run.fp8_flushing else None,
)

FP8_METRICS = (
    gauge(
        "mp_agent.fp8.flushed",
        "1",
        labels=("operand",),
        help="Share of the non-zero elements that a cast to FP8 rounds to zero when each tensor is "
        "scaled by its own amax: E4M3 for input and weight of linear layers, E5M2 for the gradient "
        "of their output; of each rank's own part of a tensor, whether or not the layer is in FP8.",
        read=_of_run(_flushed),
    ),
    gauge(
        "mp_agent.fp8.saturated",
        "1",
        help="Share of the tensors cast with a scale of an earlier step whose amax was beyond the "
        "format's largest number, or not finite. Absent without delayed scaling.",
        read=_of_run(saturated),
    ),
    gauge(
        "mp_agent.fp8.range_used.max",
        "{factor}",
        help="Amax times scale divided by the format's largest number, of the tensor where it is "
        "largest; above 1 it was saturated. Absent without delayed scaling.",
        read=_of_run(lambda values: values.get("range_used_max")),
    ),
    gauge(
        "mp_agent.fp8.range_used.min",
        "{factor}",
        help="Amax times scale divided by the format's largest number, of the tensor where it is "
        "smallest: far below 1, the tensor's scale is out of date.",
        read=_of_run(lambda values: values.get("range_used_min")),
    ),
    gauge(
        "mp_agent.fp8.scale.min",
        "{scale}",
        help="Smallest scale with which a tensor was cast. Absent without delayed scaling.",
        read=_of_run(lambda values: values.get("scale_min")),
    ),
    gauge(
        "mp_agent.fp8.scale.max",
        "{scale}",
        help="Largest scale with which a tensor was cast. Absent without delayed scaling.",
        read=_of_run(lambda values: values.get("scale_max")),
    ),
    counter(
        "mp_agent.fp8.nonfinite.elements",
        "{element}",
        help="NaN and Inf among the elements of inputs, weights and output gradients of linear "
        "layers, in the steps that were sampled.",
        count=_nonfinite,
    ),
    LAYERS_FP8_MISSCALED,
    FP8_MISSCALED_LAYER,
    FP8_FLUSHED_MAX,
    LAYERS_FP8_FLUSHED,
    FP8_FLUSHED_LAYER,
)


def _of_layer(quantity: Quantity) -> Callable[[LayerView], Reading]:
    return lambda layer: quantity(layer.values) if layer.judged else None


FP8_LAYER_METRICS = (
    *(
        layer_gauge(
            f"mp_agent.layer.fp8.{operand}.flushed",
            "1",
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
    layer_gauge(
        "mp_agent.layer.fp8.saturated",
        "1",
        family=FP8.name,
        help="Share of the layer's tensors with delayed scaling whose amax was beyond the format's "
        "largest number, or not finite.",
        read=_of_layer(saturated),
    ),
    layer_gauge(
        "mp_agent.layer.fp8.range_used.max",
        "{factor}",
        family=FP8.name,
        help="Amax times scale divided by the format's largest number, of the layer's tensor where "
        "it is largest; above 1 it was saturated.",
        read=_of_layer(lambda values: values.get("range_used_max")),
    ),
    layer_gauge(
        "mp_agent.layer.fp8.range_used.min",
        "{factor}",
        family=FP8.name,
        gives_way=True,
        help="Amax times scale divided by the format's largest number, of the layer's tensor where "
        "it is smallest.",
        read=_of_layer(lambda values: values.get("range_used_min")),
    ),
    layer_gauge(
        "mp_agent.layer.fp8.amax",
        "{element}",
        family=FP8.name,
        gives_way=True,
        help="Largest amax of the layer's tensors with delayed scaling.",
        read=_of_layer(lambda values: values.get("amax_max")),
    ),
)
