"""Converts a Snapshot to OpenTelemetry metrics data: cumulative, in requests of limited size."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtelMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from mp_agent.catalog.metric import Kind, Metric
from mp_agent.catalog.metrics.agent.export import EXPORT_METRICS
from mp_agent.catalog.metrics.agent.flight import FLIGHT_METRICS
from mp_agent.catalog.metrics.agent.transport import TRANSPORT_METRICS
from mp_agent.catalog.snapshot import Family, HistogramValue, Sample, Snapshot
from mp_agent.exporters.otlp.conversion.start_times import Key
from mp_agent.records.text import as_utf8
from mp_agent.version import __version__

SCOPE = InstrumentationScope("mp_agent", __version__)

POINTS_MAX = 4000
LABEL_CHARACTERS_MAX = 700_000
"""Per request; together they keep it below the 4 MiB that a gRPC server accepts by default."""

PROCESS_METRICS = frozenset(
    metric.name for metric in (*EXPORT_METRICS, *TRANSPORT_METRICS, *FLIGHT_METRICS)
)
"""Metrics of the node agent's own work, which restart with each process."""

_CUMULATIVE = AggregationTemporality.CUMULATIVE
_NANOSECONDS = 1e9

Point = NumberDataPoint | HistogramDataPoint


@dataclass(frozen=True, slots=True)
class Times:
    """When a snapshot was taken, and when its counters started. Nanoseconds since the epoch."""

    taken_unix_ns: int
    born_unix_ns: Mapping[str, int]
    """By run."""
    resets_unix_ns: Mapping[Key, int]
    process_unix_ns: int = 0
    """When this process started to count its own work."""

    def start(self, metric: Metric, labels: tuple[str, ...]) -> int:
        """Return the start time of a counter or histogram."""
        born = self.born_unix_ns.get(labels[0], self.taken_unix_ns)
        if metric.name in PROCESS_METRICS:
            born = max(born, self.process_unix_ns)
        start = self.resets_unix_ns.get((metric.name, labels), born)
        return min(start, self.taken_unix_ns)


def unix_ns(unix_seconds: float) -> int:
    """Return a time in nanoseconds."""
    return int(unix_seconds * _NANOSECONDS)


def attributes(metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
    """Return a series' labels; an empty one is omitted, as in Prometheus."""
    return {
        name: as_utf8(label)
        for name, label in zip(metric.label_names, labels, strict=True)
        if label
    }


def batches(snapshot: Snapshot, times: Times, resource: Resource) -> Iterator[MetricsData]:
    """Yield the snapshot in requests of limited size; a family may span several."""
    room, characters, metrics = POINTS_MAX, LABEL_CHARACTERS_MAX, list[OtelMetric]()
    for family in snapshot:
        points: list[Point] = []
        make = _POINT_MAKERS[family.metric.kind]
        for sample in family.samples:
            size = sum(map(len, sample.labels))
            if room == 0 or size > characters < LABEL_CHARACTERS_MAX:
                yield _request((*metrics, *_metric(family, points)), resource)
                room, characters, metrics, points = POINTS_MAX, LABEL_CHARACTERS_MAX, [], []
            points.append(make(family.metric, sample, times))
            room, characters = room - 1, characters - size
        metrics.extend(_metric(family, points))
    if metrics:
        yield _request(metrics, resource)


def _request(metrics: Iterable[OtelMetric], resource: Resource) -> MetricsData:
    scope = ScopeMetrics(scope=SCOPE, metrics=list(metrics), schema_url="")
    return MetricsData([ResourceMetrics(resource, [scope], resource.schema_url)])


def _metric(family: Family, points: list[Point]) -> Iterator[OtelMetric]:
    """Yield the family with these points, if there are any."""
    if not points:
        return
    data: Gauge | Sum | Histogram
    if family.metric.kind is Kind.HISTOGRAM:
        data = Histogram([p for p in points if isinstance(p, HistogramDataPoint)], _CUMULATIVE)
    elif family.metric.kind is Kind.COUNTER:
        data = Sum(
            [p for p in points if isinstance(p, NumberDataPoint)], _CUMULATIVE, is_monotonic=True
        )
    else:
        data = Gauge([p for p in points if isinstance(p, NumberDataPoint)])
    yield OtelMetric(family.metric.name, family.metric.help, family.metric.unit, data)


def _gauge_point(metric: Metric, sample: Sample, times: Times) -> Point:
    return NumberDataPoint(
        attributes(metric, sample.labels), 0, times.taken_unix_ns, _number(metric, sample)
    )


def _counter_point(metric: Metric, sample: Sample, times: Times) -> Point:
    return NumberDataPoint(
        attributes(metric, sample.labels),
        times.start(metric, sample.labels),
        times.taken_unix_ns,
        _number(metric, sample),
    )


def _histogram_point(metric: Metric, sample: Sample, times: Times) -> Point:
    value = sample.value
    if not isinstance(value, HistogramValue):
        raise TypeError(f"{metric.name}: {value!r} is not a histogram")
    below = (0, *value.cumulative_counts)
    return HistogramDataPoint(
        attributes=attributes(metric, sample.labels),
        start_time_unix_nano=times.start(metric, sample.labels),
        time_unix_nano=times.taken_unix_ns,
        count=value.cumulative_counts[-1],
        sum=value.sum,
        bucket_counts=[upper - lower for lower, upper in pairwise(below)],
        explicit_bounds=value.bounds[:-1],
        min=None,  # type: ignore[arg-type]
        max=None,  # type: ignore[arg-type]
    )


def _number(metric: Metric, sample: Sample) -> float:
    if isinstance(sample.value, HistogramValue):
        raise TypeError(f"{metric.name}: expected a number, not a histogram")
    return float(sample.value)


_POINT_MAKERS: dict[Kind, Callable[[Metric, Sample, Times], Point]] = {
    Kind.GAUGE: _gauge_point,
    Kind.INFO: _gauge_point,
    Kind.COUNTER: _counter_point,
    Kind.HISTOGRAM: _histogram_point,
}
