"""Converts snapshots and condition events to OpenTelemetry data."""

import hashlib
import os
import random
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
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
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from mp_agent.catalog.metric import Family, HistogramValue, Kind, Metric, Sample, Snapshot
from mp_agent.catalog.metrics.agent import EXPORT_METRICS, FLIGHT_METRICS, TRANSPORT_METRICS
from mp_agent.exporters.otlp.stale_series import Key
from mp_agent.inputs.files import as_utf8
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.version import __version__

SCOPE = InstrumentationScope("mp_agent", __version__)

POINTS_MAX = 4000
LABEL_CHARACTERS_MAX = 700_000
"""Most characters per request, which stays below the 4 MiB that a gRPC server accepts by
default."""

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
    """Time of birth by run."""
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


_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_POD_VARIABLES = {
    "k8s.namespace.name": ("POD_NAMESPACE", "K8S_NAMESPACE"),
    "k8s.pod.name": ("POD_NAME", "K8S_POD_NAME"),
    "k8s.pod.uid": ("POD_UID", "K8S_POD_UID"),
    "k8s.node.name": ("NODE_NAME", "K8S_NODE_NAME"),
    "k8s.container.name": ("CONTAINER_NAME", "K8S_CONTAINER_NAME"),
}
"""By attribute, the variables that the downward API commonly sets; the first one set wins.

The host name is not used: under hostNetwork it is the node's, and in an indexed Job it lacks the
end of the pod's name. A collector can fill in what is absent, not correct what is wrong.
"""


def make_resource(directory: Path) -> Resource:
    """Return the resource of the node agent that watches `directory`.

    `Resource.create` also asks the detectors of OTEL_EXPERIMENTAL_RESOURCE_DETECTORS.
    """
    pod = kubernetes_attributes(os.environ)
    own: dict[str, str | int] = {
        "service.name": "mp-agent",
        "service.version": __version__,
        "service.instance.id": instance_id(directory),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        **pod,
    }
    if namespace := pod.get("k8s.namespace.name"):
        # Becomes part of Prometheus' `job`, which separates runs of one name in two namespaces.
        own["service.namespace"] = namespace
    return Resource.create(own).merge(OTELResourceDetector().detect())


def instance_id(directory: Path) -> str:
    """Return an id that is unique to this node agent and its successors in `directory`.

    Counters survive a node agent's restart, so the series of its successor must continue them; the
    boot id and the directory's inode distinguish machines and containers of the same name.
    """
    try:
        place = directory.stat()
        identity = f"{place.st_dev}:{place.st_ino}"
    except OSError:
        identity = str(os.getpid())
    parts = (socket.gethostname(), _read(_BOOT_ID_FILE), str(directory), identity)
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "\n".join(("mp_agent", *parts))))


def kubernetes_attributes(
    variables: Mapping[str, str], namespace_file: Path = _NAMESPACE_FILE
) -> dict[str, str]:
    """Return the attributes of the pod; none outside Kubernetes."""
    if "KUBERNETES_SERVICE_HOST" not in variables:
        return {}
    attributes = {
        attribute: next((variables[name] for name in names if variables.get(name)), "")
        for attribute, names in _POD_VARIABLES.items()
    }
    attributes["k8s.namespace.name"] = attributes["k8s.namespace.name"] or _read(namespace_file)
    return {attribute: value for attribute, value in attributes.items() if value}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


EVENT_NAME = "mp_agent.condition"

_SEVERITIES = {"firing": SeverityNumber.ERROR, "resolved": SeverityNumber.INFO}


def is_sent(event: StoredConditionEvent) -> bool:
    """Return whether an event is sent: only critical ones are."""
    return event.condition.severity == "critical"


def log_records(
    events: Iterable[StoredConditionEvent], resource: Resource
) -> list[ReadableLogRecord]:
    """Return one log record per event."""
    return [ReadableLogRecord(_log_record(event), resource, SCOPE) for event in events]


def spans(events: Iterable[StoredConditionEvent], resource: Resource) -> list[ReadableSpan]:
    """Return one span of zero duration per event; those of a run form one trace."""
    return [_span(event, resource) for event in events]


def _log_record(event: StoredConditionEvent) -> LogRecord:
    return LogRecord(
        timestamp=unix_ns(event.time_unix_seconds),
        severity_number=_SEVERITIES.get(event.state, SeverityNumber.ERROR),
        severity_text="INFO" if event.state == "resolved" else event.condition.severity.upper(),
        body=as_utf8(event.condition.description or event.condition.summary),
        attributes=dict(_attributes(event)),
        event_name=EVENT_NAME,
    )


def _span(event: StoredConditionEvent, resource: Resource) -> ReadableSpan:
    moment = unix_ns(event.time_unix_seconds)
    digest = hashlib.sha256(f"mp_agent {event.condition.run}".encode(errors="replace")).digest()
    attributes = _attributes(event)
    return ReadableSpan(
        name=event.condition.name,
        context=SpanContext(
            trace_id=int.from_bytes(digest[:16], "big"),
            span_id=random.SystemRandom().getrandbits(63) | 1,
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        ),
        resource=resource,
        attributes={"run": as_utf8(event.condition.run)},
        events=[Event(EVENT_NAME, attributes=attributes, timestamp=moment)],
        start_time=moment,
        end_time=moment,
        instrumentation_scope=SCOPE,
    )


def _attributes(event: StoredConditionEvent) -> Mapping[str, str | int | float]:
    """Return what is known, under the names of the metrics' labels."""
    condition = event.condition
    known: dict[str, str | int | float] = {
        "condition": condition.name,
        "severity": condition.severity,
        "state": event.state,
        "run": condition.run,
        "rank": condition.rank,
        "layer": condition.layer,
        "phase": condition.phase,
        "step": event.step,
        "since_step": condition.since_step,
        "value": condition.value,
        "summary": condition.summary,
        "remedy": condition.remedy,
        "postmortem": condition.postmortem,
    }
    return {
        name: as_utf8(value) if isinstance(value, str) else value
        for name, value in known.items()
        if value != "" and not (isinstance(value, float) and not isfinite(value))
    }
