"""Series that were sent and are gone: told with the flag that OTLP has for it.

A scrape ends a series by not showing it any more. Whoever is pushed to keeps the last value for
minutes instead, unless told that there is none; receivers store that as Prometheus' stale marker.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import DataPointFlags
from opentelemetry.sdk.metrics.export import MetricsData

from mp_agent.catalog.metric import Kind, Metric
from mp_agent.catalog.snapshot import Family, HistogramValue, Sample, Snapshot

_NO_RECORDED_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_REMEMBERED_MAX = 100_000

Series = dict[Metric, frozenset[tuple[str, ...]]]
"""Label values by metric."""


class NoRecordedValues(MetricsData):
    """Points whose values count for nothing: they only say that there is none any more."""


@dataclass(slots=True)
class SentSeries:
    """Remembers what the other side may hold as current."""

    _held: Series = field(default_factory=dict)

    def vanished(self, snapshot: Snapshot) -> Snapshot:
        """Return the series that the other side may hold and that `snapshot` lacks, at 0."""
        current = series_of(snapshot)
        families = (
            (metric, labels - current.get(metric, frozenset()))
            for metric, labels in self._held.items()
        )
        return Snapshot(
            tuple(_zeros(metric, labels) for metric, labels in families if labels),
            snapshot.time_unix_seconds,
        )

    def pushed(self, snapshot: Snapshot, *, delivered: bool) -> None:
        """Note a push. Without an answer, what it held may have arrived or not: both are kept."""
        current = series_of(snapshot)
        if delivered:
            self._held = current
        elif sum(map(len, self._held.values())) < _REMEMBERED_MAX:
            for metric, labels in current.items():
                self._held[metric] = self._held.get(metric, frozenset()) | labels


def series_of(snapshot: Snapshot) -> Series:
    """Return all series of a snapshot."""
    return {
        family.metric: frozenset(sample.labels for sample in family.samples)
        for family in snapshot
        if family.samples
    }


def flag_all(request: ExportMetricsServiceRequest) -> ExportMetricsServiceRequest:
    """Flag every point of an encoded request as one without a value, and take the values out.

    A histogram keeps its sum, 0: without one, VictoriaMetrics would leave `_sum` as it was.
    """
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                for point in getattr(metric, kind).data_points:
                    point.flags = _NO_RECORDED_VALUE
                    if kind != "histogram":
                        point.ClearField(point.WhichOneof("value"))
    return request


def _zeros(metric: Metric, labels: Iterable[tuple[str, ...]]) -> Family:
    value: float | HistogramValue = 0.0
    if metric.kind is Kind.HISTOGRAM:
        # With its bounds, since each bucket is a series of its own to Prometheus.
        counts = (0,) * (len(metric.bounds) + 1)
        value = HistogramValue((*metric.bounds, float("inf")), counts, 0.0)
    return Family(metric, tuple(Sample(series, value) for series in sorted(labels)))
