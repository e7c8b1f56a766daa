"""Metrics of the distribution of magnitudes, and of tensor collections."""

from collections.abc import Callable, Mapping
from math import floor, log2, sqrt

from mp_agent.catalog.metric import Metric, Reading, gauge, layer_gauge
from mp_agent.catalog.metrics.gradients import deviation, mean, of_fp16
from mp_agent.catalog.metrics.optimizer import Quantity
from mp_agent.records.columns import DISTRIBUTION, EXPONENTS, GRADIENTS, exponent_column
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import CollectionView, LayerView, RunView

_FP16_MAX = 65504.0
_FP16_SMALLEST = 2.0**-24
_FLUSHED = {
    "half": "flushed_at_half_elements",
    "in_force": "flushed_elements",
    "double": "flushed_at_double_elements",
}
_WIDTH = EXPONENTS[1] - EXPONENTS[0]


def _values(run: RunView) -> Mapping[str, float]:
    return run.latest.families.get(DISTRIBUTION.name, {})


def _of_run(quantity: Quantity) -> Callable[[RunView], Reading]:
    return lambda run: quantity(_values(run))


def _of_layer(quantity: Quantity) -> Callable[[LayerView], Reading]:
    return lambda layer: quantity(layer.values) if layer.judged else None


def _exponents(run: RunView) -> Reading:
    values = _values(run)
    return {
        (f"{2.0 ** (exponent + _WIDTH):g}",): values.get(exponent_column(exponent))
        for exponent in EXPONENTS
    }


def fp16_low_headroom(step: MergedStep) -> float | None:
    """Return the doublings from FP16's smallest number to a step's smallest scaled gradient.

    Takes logarithms one by one: the product may be beyond float64.
    """
    smallest, scale = step.get("abs_min"), step.loss_scale
    if not smallest or not scale:
        return None
    return log2(smallest) + log2(scale) - log2(_FP16_SMALLEST)


def _best_scale(run: RunView) -> Reading:
    """Return a power of two at which one more doubling still fits."""
    judged = run.latest.judged
    largest = None if judged is None else judged.get("abs_max")
    if judged is None or not largest or not judged.loss_scale:
        return None
    exponent = floor(log2(_FP16_MAX) - log2(largest)) - 1
    return 2.0**exponent if -1000 < exponent < 1000 else None


GRAD_FP16_FLUSHED = gauge(
    "mp_agent.grad.fp16.flushed",
    "1",
    labels=("scale",),
    help="Share of the non-zero gradient elements that FP16 rounds to zero: at the loss scale "
    "in_force, and as it would be at half and at double that scale. Zeros that FP16 already "
    "made are not seen. Absent without a loss scale.",
    read=lambda run: (
        {(scale,): of_fp16(column)(_values(run)) for scale, column in _FLUSHED.items()}
    ),
)

DISTRIBUTION_METRICS = (
    gauge(
        "mp_agent.grad.mean",
        "{gradient}",
        help="Mean of all elements of the unscaled gradients.",
        read=_of_run(mean),
    ),
    gauge(
        "mp_agent.grad.deviation",
        "{gradient}",
        help="Standard deviation of all elements of the unscaled gradients.",
        read=_of_run(deviation),
    ),
    gauge(
        "mp_agent.grad.exponent.elements",
        "{element}",
        labels=("below",),
        help="Gradient elements by magnitude, unscaled: those below the label's value and not "
        "below a 16th of it; the first also has all smaller ones but zero, the last all larger "
        "ones.",
        read=_exponents,
    ),
    GRAD_FP16_FLUSHED,
    gauge(
        "mp_agent.grad.fp16.subnormal",
        "1",
        help="Share of the non-zero gradient elements that are subnormal in FP16 at the loss scale "
        "in force, with fewer significant bits the smaller they are.",
        read=_of_run(of_fp16("subnormal_elements")),
    ),
    gauge(
        "mp_agent.grad.fp16.near_overflow",
        "1",
        help="Share of the non-zero gradient elements above 60 000 at the loss scale in force.",
        read=_of_run(of_fp16("near_overflow_elements")),
    ),
    gauge(
        "mp_agent.grad.fp16.overflow_at_double",
        "1",
        help="Share of the non-zero gradient elements that would be Inf in FP16 at twice the loss "
        "scale in force.",
        read=_of_run(of_fp16("overflow_at_double_elements")),
    ),
    gauge(
        "mp_agent.grad.fp16.headroom_low",
        "{bit}",
        help="Halvings that the smallest non-zero scaled gradient is away from FP16's smallest "
        "number, same step as the norm; negative below it. Absent without a loss scale.",
        read=lambda run: fp16_low_headroom(run.latest.judged) if run.latest.judged else None,
    ),
    gauge(
        "mp_agent.loss_scale.best",
        "{scale}",
        help="Largest power of two at which the largest gradient of the step still fits into FP16 "
        "with a factor of two to spare. Absent without a loss scale.",
        read=_best_scale,
    ),
)

DISTRIBUTION_LAYER_METRICS = (
    layer_gauge(
        "mp_agent.layer.grad.deviation",
        "{gradient}",
        family=DISTRIBUTION.name,
        gives_way=True,
        help="Standard deviation of the elements of the layer's unscaled gradient.",
        read=_of_layer(deviation),
    ),
    layer_gauge(
        "mp_agent.layer.grad.fp16.flushed",
        "1",
        family=DISTRIBUTION.name,
        help="Share of the layer's non-zero gradient elements that FP16 rounds to zero at the loss "
        "scale in force.",
        read=_of_layer(of_fp16("flushed_elements")),
    ),
)


def _of_family(family: str, quantity: Quantity) -> Callable[[CollectionView], float | None]:
    def read(collection: CollectionView) -> float | None:
        values = collection.families.get(family)
        return None if values is None else quantity(values)

    return read


def _gauge(
    name: str, unit: str, text: str, read: Callable[[CollectionView], float | None]
) -> Metric:
    def read_run(run: RunView) -> Reading:
        return {(label,): read(collection) for label, collection in run.collections.items()}

    return gauge(
        f"mp_agent.collection.{name}",
        unit,
        labels=("collection",),
        help=text,
        read=read_run,
    )


def _gradient(name: str, unit: str, text: str, quantity: Quantity) -> Metric:
    return _gauge(f"grad.{name}", unit, text, _of_family(GRADIENTS.name, quantity))


def _distribution(name: str, unit: str, text: str, quantity: Quantity) -> Metric:
    needs = " Absent without measure_distribution."
    return _gauge(f"grad.{name}", unit, text + needs, _of_family(DISTRIBUTION.name, quantity))


COLLECTION_METRICS = (
    _gauge(
        "layers",
        "{layer}",
        "Layers of a collection, which the script defines by mp_agent.collection; 0 if no name of "
        "a parameter matches.",
        lambda collection: float(collection.layers),
    ),
    _gradient(
        "norm",
        "{norm}",
        "L2 norm of the collection's unscaled gradients before clipping, at the last sampled step "
        "that counts.",
        lambda values: sqrt(values["sum_squares"]),
    ),
    _gradient(
        "abs_max",
        "{gradient}",
        "Largest gradient magnitude in the collection.",
        lambda values: values.get("abs_max"),
    ),
    _gradient(
        "abs_min",
        "{gradient}",
        "Smallest gradient magnitude in the collection other than zero; absent when all are zero.",
        lambda values: values.get("abs_min"),
    ),
    _gauge(
        "grad.nonfinite.elements",
        "{element}",
        "NaN and Inf gradient elements of the collection at the last sampled step, also one that "
        "does not count.",
        lambda collection: collection.nonfinite_elements if collection.layers else None,
    ),
    _distribution(
        "mean",
        "{gradient}",
        "Mean of all elements of the collection's unscaled gradients.",
        mean,
    ),
    _distribution(
        "deviation",
        "{gradient}",
        "Standard deviation of all elements of the collection's unscaled gradients.",
        deviation,
    ),
    _distribution(
        "fp16.near_overflow",
        "1",
        "Share of the collection's non-zero gradient elements above 60 000 at the loss scale in "
        "force; absent without a loss scale.",
        of_fp16("near_overflow_elements"),
    ),
)
