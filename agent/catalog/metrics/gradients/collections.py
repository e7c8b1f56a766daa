"""Run scope: gradients of the groups of parameters that the script names, at the last sample."""

from collections.abc import Callable
from math import sqrt

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.catalog.metrics.gradients.quantities import deviation, mean, of_fp16
from mp_agent.catalog.metrics.optimizer.quantities import Quantity
from mp_agent.records.columns import DISTRIBUTION, GRADIENTS
from mp_agent.records.views import CollectionView, RunView


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

    return Metric(
        name=f"mp_agent.collection.{name}",
        unit=unit,
        kind=Kind.GAUGE,
        scope=Scope.RUN,
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
