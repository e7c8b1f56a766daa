"""A Snapshot as Prometheus text or OpenMetrics."""

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mp_agent.catalog.metric import Family, HistogramValue, Kind, Sample, Snapshot
from mp_agent.inputs.files import as_utf8


class SnapshotCollector(Collector):
    """Makes fresh metric objects from one snapshot, so that no series outlives its subject."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have samples, in the catalog's order."""
        for family in self._snapshot:
            if family.samples:
                yield _FAMILY_MAKERS[family.metric.kind](family)


def render(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the exposition and its content type, in the format that `accept` prefers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    encode, chosen = choose_encoder(accept)
    return encode(registry), chosen


def content_type(accept: str = "") -> str:
    """Return the content type of the format that `accept` prefers."""
    return choose_encoder(accept)[1]


def _numbers(
    make: type[GaugeMetricFamily | CounterMetricFamily], family: Family
) -> GaugeMetricFamily | CounterMetricFamily:
    exposed = make(
        family.metric.prometheus_name, family.metric.help, labels=family.metric.label_names
    )
    for sample in family.samples:
        exposed.add_metric(_labels(family, sample), _number(sample))
    return exposed


def _info(family: Family) -> Metric:
    """Return an info family; plain text, which has none, shows a gauge of the same name."""
    exposed = InfoMetricFamily(
        family.metric.prometheus_name.removesuffix("_info"),
        family.metric.help,
        labels=family.metric.label_names,
    )
    for sample in family.samples:
        exposed.add_metric(_labels(family, sample), {})
    return exposed


def _histogram(family: Family) -> Metric:
    exposed = HistogramMetricFamily(
        family.metric.prometheus_name, family.metric.help, labels=family.metric.label_names
    )
    for sample in family.samples:
        if not isinstance(sample.value, HistogramValue):
            raise TypeError(f"{exposed.name}: {sample.value!r} is not a histogram")
        bounds = map(floatToGoString, sample.value.bounds)
        buckets = list(zip(bounds, sample.value.cumulative_counts, strict=True))
        exposed.add_metric(_labels(family, sample), buckets, sample.value.sum)
    return exposed


def _labels(family: Family, sample: Sample) -> tuple[str, ...]:
    """Return a series' label values, without the optional ones that it lacks; those come last."""
    count = len(sample.labels)
    optional = len(family.metric.optional_labels)
    while optional and not sample.labels[count - 1]:
        count, optional = count - 1, optional - 1
    return tuple(map(as_utf8, sample.labels[:count]))


def _number(sample: Sample) -> float:
    if isinstance(sample.value, HistogramValue):
        raise TypeError(f"{sample.labels}: a histogram where a number belongs")
    return sample.value


_FAMILY_MAKERS: dict[Kind, Callable[[Family], Metric]] = {
    Kind.GAUGE: partial(_numbers, GaugeMetricFamily),
    Kind.COUNTER: partial(_numbers, CounterMetricFamily),
    Kind.INFO: _info,
    Kind.HISTOGRAM: _histogram,
}
