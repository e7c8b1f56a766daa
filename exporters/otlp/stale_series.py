"""When series began, and which of them have ended since the last push.

Ends series that were sent and no longer exist, with OTLP's "no recorded value" flag.
A scrape ends a series by omitting it. The receiver of a push would keep the last value for minutes
instead; it stores the flag as Prometheus' stale marker.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import DataPointFlags
from opentelemetry.sdk.metrics.export import MetricsData

from mp_agent.catalog.metric import Family, HistogramValue, Kind, Metric, Sample, Snapshot

Key = tuple[str, tuple[str, ...]]
"""OpenTelemetry name and label values: one series."""

CUMULATIVE = frozenset({Kind.COUNTER, Kind.HISTOGRAM})


@dataclass(slots=True)
class StartTimes:
    """Remembers the counters of the last snapshot, to detect resets."""

    _levels: dict[Key, float] = field(default_factory=dict)
    _resets_unix_ns: dict[Key, int] = field(default_factory=dict)
    _last_unix_ns: int = 0

    def follow(self, snapshot: Snapshot, time_unix_ns: int) -> Mapping[Key, int]:
        """Return when counters were last reset, in nanoseconds since the epoch, where they were.

        A counter that fell was reset after the previous snapshot, at the earliest.
        """
        levels: dict[Key, float] = {}
        for family in snapshot:
            if family.metric.kind in CUMULATIVE:
                for sample in family.samples:
                    key = (family.metric.name, sample.labels)
                    level = levels[key] = _level(sample)
                    if level < self._levels.get(key, 0.0):
                        self._resets_unix_ns[key] = self._last_unix_ns
        self._resets_unix_ns = {
            key: start for key, start in self._resets_unix_ns.items() if key in levels
        }
        self._levels, self._last_unix_ns = levels, time_unix_ns
        return self._resets_unix_ns


def _level(sample: Sample) -> float:
    """Return the part of a cumulative value that never falls without a reset."""
    if isinstance(sample.value, HistogramValue):
        return float(sample.value.cumulative_counts[-1])
    return sample.value


_NO_RECORDED_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_REMEMBERED_MAX = 100_000

Series = dict[Metric, frozenset[tuple[str, ...]]]
"""Label values of series, by metric."""


class NoRecordedValues(MetricsData):
    """Points that end their series; their values are ignored."""


@dataclass(slots=True)
class SentSeries:
    """Remembers which series the receiver may hold as current."""

    _held: Series = field(default_factory=dict)

    def stale(self, snapshot: Snapshot) -> Snapshot:
        """Return the series that the receiver may hold and that `snapshot` lacks, with value 0."""
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
        """Record a push. If undelivered, its series may have arrived: old and new ones are kept."""
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


def flag_no_recorded_value(request: ExportMetricsServiceRequest) -> ExportMetricsServiceRequest:
    """Flag every point of an encoded request as one without a value, and clear the values.

    A histogram keeps its sum, 0: without one, VictoriaMetrics would not end `_sum`.
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
        # With its bounds, since each bucket is a series of its own in Prometheus.
        counts = (0,) * (len(metric.bounds) + 1)
        value = HistogramValue((*metric.bounds, float("inf")), counts, 0.0)
    return Family(metric, tuple(Sample(series, value) for series in sorted(labels)))
