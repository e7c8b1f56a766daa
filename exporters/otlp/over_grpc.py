"""The official exporters over gRPC, with stubs that look at the answers."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpc import Compression, RpcError, StatusCode  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.sdk.metrics.export import MetricsData

from mp_agent.exporters.otlp.clients import Exporter, ExportError
from mp_agent.exporters.otlp.environment import Signal, Transport, variable_names
from mp_agent.exporters.otlp.grpc_credentials import credentials
from mp_agent.exporters.otlp.vanished import NoRecordedValues, flag_all

_REJECTED_FIELDS = ("rejected_data_points", "rejected_log_records", "rejected_spans")
_FOR_GOOD = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.PERMISSION_DENIED,
    StatusCode.UNAUTHENTICATED,
    StatusCode.UNIMPLEMENTED,
}
"""Codes after which the same request will not be accepted later."""


@dataclass(slots=True)
class GrpcVerdict:
    """What the last answer said. To wait, and to tell the details, the exporter itself knows."""

    refused_for_good: bool = False
    retry_after_seconds: float = 0.0
    explanation: str = ""


class _CheckedStub:
    """Calls the service, notes what it said, and raises when it took only a part."""

    def __init__(self, stub: Any, verdict: GrpcVerdict) -> None:
        self._stub = stub
        self._verdict = verdict

    def Export(self, **call: Any) -> Any:
        self._verdict.refused_for_good = False
        try:
            partial = (response := self._stub.Export(**call)).partial_success
        except RpcError as error:
            self._verdict.refused_for_good = error.code() in _FOR_GOOD
            raise
        for field in _REJECTED_FIELDS:
            if rejected := getattr(partial, field, 0):
                # What was taken would be there twice.
                self._verdict.refused_for_good = True
                raise ExportError(f"took all but {rejected}: {partial.error_message}")
        return response


class _Checked:
    """Puts the checked stub in; the channel is made anew after each loss of the connection."""

    _client: Any

    def __init__(self, verdict: GrpcVerdict, **options: Any) -> None:
        self._verdict = verdict
        super().__init__(**options)

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[misc]
        self._client = _CheckedStub(self._client, self._verdict)


class MetricExporter(_Checked, OTLPMetricExporter):
    """Knows besides how to say that series have no value any more."""

    def _translate_data(self, data: MetricsData) -> ExportMetricsServiceRequest:
        request = super()._translate_data(data)
        return flag_all(request) if isinstance(data, NoRecordedValues) else request


class LogExporter(_Checked, OTLPLogExporter):
    """The log exporter, checked."""


class SpanExporter(_Checked, OTLPSpanExporter):
    """The span exporter, checked."""


_EXPORTERS: dict[Signal, Callable[..., Exporter]] = {
    Signal.METRICS: MetricExporter,
    Signal.LOGS: LogExporter,
    Signal.TRACES: SpanExporter,
}


def open_exporter(transport: Transport, timeout_seconds: float) -> tuple[Exporter, GrpcVerdict]:
    """Return an exporter, configured by the OTEL_* variables, and what it hears.

    The compression is given, since the exporter refuses `none`, a value of the specification.
    """
    verdict = GrpcVerdict()
    without_tls = _is_without_tls(transport.signal)
    exporter = _EXPORTERS[transport.signal](
        verdict,
        timeout=timeout_seconds,
        compression=Compression.Gzip if transport.gzip_over_grpc else Compression.NoCompression,
        insecure=without_tls or None,
        credentials=None if without_tls else credentials(transport.signal),
    )
    return exporter, verdict


def _is_without_tls(signal: Signal) -> bool:
    """Return whether the endpoint's scheme says so; it comes before OTEL_EXPORTER_OTLP_INSECURE."""
    named = (os.environ.get(name) for name in variable_names(signal, "ENDPOINT"))
    return next(filter(None, named), "http://").startswith("http://")
