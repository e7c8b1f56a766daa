"""The official exporters over gRPC, with stubs that look at the answers."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from grpc import Compression, RpcError, StatusCode  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.sdk.metrics.export import MetricsData

from mp_agent.exporters.otlp.clients import Exporter, ExportError
from mp_agent.exporters.otlp.environment import OtlpSignal, OtlpTransport, variable_names
from mp_agent.exporters.otlp.grpc_credentials import credentials
from mp_agent.exporters.otlp.vanished import NoRecordedValues, flag_all

_REJECTED_FIELDS = ("rejected_data_points", "rejected_log_records", "rejected_spans")
_MAY_CHANGE = {
    StatusCode.CANCELLED,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.ABORTED,
    StatusCode.OUT_OF_RANGE,
    StatusCode.UNAVAILABLE,
    StatusCode.DATA_LOSS,
}
"""Codes after which the same request may be sent again; after no other, says OTLP/gRPC, except for
RESOURCE_EXHAUSTED that comes with a RetryInfo."""
_OF_THE_CONTENT = {StatusCode.INVALID_ARGUMENT, StatusCode.RESOURCE_EXHAUSTED}
"""Codes that may be due to a part of what was sent."""
_RETRY_INFO = "google.rpc.retryinfo-bin"


@dataclass(slots=True)
class GrpcVerdict:
    """What the last answer said. The details the exporter itself tells."""

    refused_for_good: bool = False
    perhaps_in_part: bool = False
    rejected: int = 0
    retry_after_seconds: float = 0.0
    explanation: str = ""


class _CheckedStub:
    """Calls the service, notes what it said, and raises when it did not take all for good."""

    def __init__(self, stub: Any, verdict: GrpcVerdict) -> None:
        self._stub = stub
        self._verdict = verdict

    def Export(self, **call: Any) -> Any:
        verdict = self._verdict
        verdict.refused_for_good = verdict.perhaps_in_part = False
        verdict.rejected, verdict.retry_after_seconds = 0, 0.0
        try:
            partial = (response := self._stub.Export(**call)).partial_success
        except RpcError as error:
            self._note(error)
            if verdict.refused_for_good and error.code() is StatusCode.RESOURCE_EXHAUSTED:
                # The exporter would repeat it.
                raise ExportError(f"{error.code()}: {error.details()}") from None
            raise
        for field in _REJECTED_FIELDS:
            if rejected := getattr(partial, field, 0):
                # What was taken would be there twice.
                verdict.refused_for_good, verdict.rejected = True, rejected
                raise ExportError(f"took all but {rejected}: {partial.error_message}")
        return response

    def _note(self, error: Any) -> None:
        code, delay_seconds = error.code(), _retry_delay_seconds(error)
        exhausted_for_now = code is StatusCode.RESOURCE_EXHAUSTED and delay_seconds is not None
        self._verdict.refused_for_good = code not in _MAY_CHANGE and not exhausted_for_now
        self._verdict.perhaps_in_part = code in _OF_THE_CONTENT
        self._verdict.retry_after_seconds = delay_seconds or 0.0


def _retry_delay_seconds(error: Any) -> float | None:
    """Return for how long a RetryInfo asks to wait; None where there is none."""
    encoded = dict(error.trailing_metadata() or ()).get(_RETRY_INFO)
    try:
        delay = None if encoded is None else RetryInfo.FromString(encoded).retry_delay
    except DecodeError:
        return None
    return None if delay is None else max(delay.seconds + delay.nanos * 1e-9, 0.0)


class _Checked:
    """Puts the checked stub in; the channel is made anew after each loss of the connection."""

    _client: Any

    def __init__(self, verdict: GrpcVerdict, **options: Any) -> None:
        self._verdict = verdict
        super().__init__(**options)

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[misc]
        self._client = _CheckedStub(self._client, self._verdict)


class GrpcMetricExporter(_Checked, OTLPMetricExporter):
    """Knows besides how to say that series have no value any more."""

    def _translate_data(self, data: MetricsData) -> ExportMetricsServiceRequest:
        request = super()._translate_data(data)
        return flag_all(request) if isinstance(data, NoRecordedValues) else request


class LogExporter(_Checked, OTLPLogExporter):
    """The log exporter, checked."""


class SpanExporter(_Checked, OTLPSpanExporter):
    """The span exporter, checked."""


_EXPORTERS: dict[OtlpSignal, Callable[..., Exporter]] = {
    OtlpSignal.METRICS: GrpcMetricExporter,
    OtlpSignal.LOGS: LogExporter,
    OtlpSignal.TRACES: SpanExporter,
}


def open_exporter(transport: OtlpTransport, timeout_seconds: float) -> tuple[Exporter, GrpcVerdict]:
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


def _is_without_tls(signal: OtlpSignal) -> bool:
    """Return whether the endpoint's scheme says so; it comes before OTEL_EXPORTER_OTLP_INSECURE."""
    named = (os.environ.get(name) for name in variable_names(signal, "ENDPOINT"))
    return next(filter(None, named), "http://").startswith("http://")
