"""The official exporters over gRPC, with the certificates that OTEL_* variables name.

The certificates that the OTEL_* variables name, for gRPC.
The official exporter sends a client certificate only if an authority is configured too, does not
mix a signal's own variables with those for all signals, and ignores a missing file. Over HTTP it
does none of this.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from grpc import Compression, RpcError, StatusCode, ssl_channel_credentials
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.sdk.metrics.export import MetricsData

from mp_agent.exporters.otlp.client import ExportError, OtlpExporter
from mp_agent.exporters.otlp.environment import OtlpSignal, OtlpTransport, variable_names
from mp_agent.exporters.otlp.stale_series import NoRecordedValues, flag_no_recorded_value
from mp_agent.inputs.addresses import is_loopback


def credentials(signal: OtlpSignal) -> Any:
    """Return the channel's credentials; None if no variable names a file.

    None, too, if a credential provider is configured, which the exporter calls itself. Raises
    ExportError when a file cannot be read, or for a key without its certificate or vice versa.
    """
    if _has_provider(signal):
        return None
    authority, key, certificate = (
        _content(signal, what) for what in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
    )
    if bool(key) is not bool(certificate):
        # gRPC would abort the process.
        raise ExportError(
            "OTEL_EXPORTER_OTLP_CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE must be set "
            "together"
        )
    if authority is None and certificate is None:
        return None
    return ssl_channel_credentials(authority, key, certificate)


def _content(signal: OtlpSignal, what: str) -> bytes | None:
    named = (name for name in variable_names(signal, what) if os.environ.get(name))
    if (name := next(named, None)) is None:
        return None
    path = Path(os.environ[name])
    try:
        return path.read_bytes()
    except OSError as error:
        raise ExportError(f"{name}: {path}: {error.strerror}") from None


def _has_provider(signal: OtlpSignal) -> bool:
    names = (
        "OTEL_PYTHON_EXPORTER_OTLP_GRPC_CREDENTIAL_PROVIDER",
        f"OTEL_PYTHON_EXPORTER_OTLP_GRPC_{signal.value}_CREDENTIAL_PROVIDER",
    )
    return any(os.environ.get(name) for name in names)


_REJECTED_FIELDS = ("rejected_data_points", "rejected_log_records", "rejected_spans")
_RETRYABLE = {
    StatusCode.CANCELLED,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.ABORTED,
    StatusCode.OUT_OF_RANGE,
    StatusCode.UNAVAILABLE,
    StatusCode.DATA_LOSS,
}
"""Codes after which OTLP/gRPC lets a client retry the same request; RESOURCE_EXHAUSTED is another
if it comes with a RetryInfo."""
_DUE_TO_CONTENT = {StatusCode.INVALID_ARGUMENT, StatusCode.RESOURCE_EXHAUSTED}
"""Codes that may be due to a part of the request."""
ANSWER_BYTES_MAX = 1 << 16
_RETRY_INFO = "google.rpc.retryinfo-bin"
_WITHOUT_PROXY = (("grpc.enable_http_proxy", 0),)
"""Channel options by which gRPC ignores the environment's proxy."""


@dataclass(slots=True)
class GrpcResponse:
    """The last response. The exporter itself logs its details."""

    refused_permanently: bool = False
    may_be_partly_acceptable: bool = False
    rejected: int = 0
    retry_after_seconds: float = 0.0
    explanation: str = ""


class _CheckedStub:
    """Calls the service, records the response, and raises on a permanent or partial refusal."""

    def __init__(self, stub: Any, response: GrpcResponse) -> None:
        self._stub = stub
        self._response = response

    def Export(self, **call: Any) -> Any:
        response = self._response
        response.refused_permanently = response.may_be_partly_acceptable = False
        response.rejected, response.retry_after_seconds = 0, 0.0
        try:
            message = self._stub.Export(**call)
        except RpcError as error:
            exhausted = error.code() is StatusCode.RESOURCE_EXHAUSTED
            if exhausted and _has_unread_answer(error):
                # No refusal: what was sent may have been accepted.
                raise ExportError(f"{error.details()}: is the endpoint right?") from None
            self._note(error)
            delay_seconds = _retry_delay_seconds(error)
            is_hasty = delay_seconds is not None and delay_seconds <= 0.0
            if (response.refused_permanently and exhausted) or is_hasty:
                # The exporter would retry it, after such a delay at once.
                raise ExportError(f"{error.code()}: {error.details()}") from None
            raise
        for field in _REJECTED_FIELDS:
            if (rejected := getattr(message.partial_success, field, 0)) > 0:
                # A retry would duplicate what was accepted.
                response.refused_permanently, response.rejected = True, rejected
                problem = message.partial_success.error_message
                raise ExportError(f"accepted all but {rejected}: {problem}")
        return message

    def _note(self, error: Any) -> None:
        code, delay_seconds = error.code(), _retry_delay_seconds(error)
        exhausted_for_now = code is StatusCode.RESOURCE_EXHAUSTED and delay_seconds is not None
        self._response.refused_permanently = code not in _RETRYABLE and not exhausted_for_now
        self._response.may_be_partly_acceptable = code in _DUE_TO_CONTENT
        self._response.retry_after_seconds = max(delay_seconds or 0.0, 0.0)


def _has_unread_answer(error: Any) -> bool:
    """Return whether gRPC has discarded an answer on this side, since it is too large."""
    details = error.details() or ""
    return f"vs. {ANSWER_BYTES_MAX})" in details or "received metadata size exceeds" in details


def _retry_delay_seconds(error: Any) -> float | None:
    """Return the delay that a RetryInfo asks for; None without one."""
    encoded = dict(error.trailing_metadata() or ()).get(_RETRY_INFO)
    try:
        delay = None if encoded is None else RetryInfo.FromString(encoded).retry_delay
    except DecodeError:
        return None
    return None if delay is None else delay.seconds + delay.nanos * 1e-9


class _CheckedExporter:
    """Replaces the stub by a checked one, again whenever the exporter reopens its channel."""

    _client: Any

    def __init__(self, response: GrpcResponse, **options: Any) -> None:
        self._response = response
        super().__init__(**options)

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[misc]
        self._client = _CheckedStub(self._client, self._response)


class GrpcMetricExporter(_CheckedExporter, OTLPMetricExporter):
    """Can also send points without a value, which end their series."""

    def _translate_data(self, data: MetricsData) -> ExportMetricsServiceRequest:
        request = super()._translate_data(data)
        return flag_no_recorded_value(request) if isinstance(data, NoRecordedValues) else request


class GrpcLogExporter(_CheckedExporter, OTLPLogExporter):
    """The log exporter, checked."""


class GrpcSpanExporter(_CheckedExporter, OTLPSpanExporter):
    """The span exporter, checked."""


_EXPORTERS: dict[OtlpSignal, Callable[..., OtlpExporter]] = {
    OtlpSignal.METRICS: GrpcMetricExporter,
    OtlpSignal.LOGS: GrpcLogExporter,
    OtlpSignal.TRACES: GrpcSpanExporter,
}


def open_grpc_exporter(
    transport: OtlpTransport, timeout_seconds: float
) -> tuple[OtlpExporter, GrpcResponse]:
    """Return an exporter, configured by the OTEL_* variables, and where it records responses.

    The compression is passed, since the exporter refuses `none`, a value of the specification.
    """
    response = GrpcResponse()
    insecure = _is_insecure(transport.signal)
    exporter = _EXPORTERS[transport.signal](
        response,
        timeout=timeout_seconds,
        compression=Compression.Gzip if transport.gzip_over_grpc else Compression.NoCompression,
        insecure=insecure or None,
        credentials=None if insecure else credentials(transport.signal),
        channel_options=_channel_options(transport.signal),
    )
    return exporter, response


def _channel_options(signal: OtlpSignal) -> tuple[tuple[str, int], ...]:
    bounded = (("grpc.max_receive_message_length", ANSWER_BYTES_MAX),)
    return (*bounded, *_WITHOUT_PROXY) if _is_on_this_machine(signal) else bounded


def _is_on_this_machine(signal: OtlpSignal) -> bool:
    """Return whether the collector is reached at a loopback address."""
    address = _endpoint(signal)
    with_scheme = address if "://" in address else f"//{address}"
    try:
        return is_loopback(urlsplit(with_scheme).hostname or "")
    except ValueError:
        return False


def _is_insecure(signal: OtlpSignal) -> bool:
    """Return whether the endpoint's scheme is http, which overrides OTEL_EXPORTER_OTLP_INSECURE."""
    return _endpoint(signal).startswith("http://")


def _endpoint(signal: OtlpSignal) -> str:
    named = (os.environ.get(name) for name in variable_names(signal, "ENDPOINT"))
    return next(filter(None, named), "http://localhost:4317")
