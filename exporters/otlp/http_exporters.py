"""The official exporters over HTTP, with refusals that they take for success detected.

The HTTP session of the official exporters: it detects refusals that they take for success.
They count every status below 400 as delivered and ignore the body, so that a redirect to a login
page, or a response that rejects some points, would pass for success. They read a body to its end,
in memory that belongs to the training. Besides, a session prefers REQUESTS_CA_BUNDLE to
OTEL_EXPORTER_OTLP_CERTIFICATE by default.
"""

import os
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import requests
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from urllib3.exceptions import HTTPError

from mp_agent.exporters.otlp.client import OtlpExporter
from mp_agent.exporters.otlp.environment import OtlpSignal, OtlpTransport
from mp_agent.exporters.otlp.stale_series import NoRecordedValues, flag_no_recorded_value
from mp_agent.inputs.addresses import is_loopback

_RESPONSES: dict[OtlpSignal, tuple[Any, str]] = {
    OtlpSignal.METRICS: (ExportMetricsServiceResponse, "rejected_data_points"),
    OtlpSignal.LOGS: (ExportLogsServiceResponse, "rejected_log_records"),
    OtlpSignal.TRACES: (ExportTraceServiceResponse, "rejected_spans"),
}
_PROTOBUF = "application/x-protobuf"
_WEB_PAGE = "text/html"
_EXPLANATION_CHARACTERS_MAX = 200
ANSWER_BYTES_MAX = 1 << 16
"""Most bytes of a body that are read, and of what is unpacked of it."""
_READ_BYTES = 1 << 13
_READ_SECONDS = 10.0
"""Where a request has no time-out."""
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_RETRYABLE = {429, 502, 503, 504}
"""The only statuses after which OTLP/HTTP lets a client retry the same request."""
_DUE_TO_CONTENT = {400, 413, 422}
"""Statuses that may be due to a part of the request."""


class RefusedError(requests.RequestException):
    """The endpoint answered, and did not accept the request."""


class CheckedSession(requests.Session):
    """A session that raises RefusedError for a 2xx or 3xx response that is a refusal."""

    def __init__(self, signal: OtlpSignal) -> None:
        super().__init__()
        # What another package unpacks, such as br, would be asked for as well, if it is installed.
        self.headers["Accept-Encoding"] = "gzip"
        self._signal = signal
        self.refused_permanently = False
        """Whether sending the same again cannot succeed, by the last response."""
        self.may_be_partly_acceptable = False
        """Whether the refusal may be due to a part of the request."""
        self.rejected = 0
        """Points, records or spans that the last response rejects of a request it accepts."""
        self.retry_after_seconds = 0.0
        """The delay that the last response asks for."""
        self.explanation = ""
        """The text of the last error, besides its status."""
        self._deadline_seconds = 0.0
        """When an answer that still arrives is given up."""
        self.hooks["response"].append(self._check)

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send; the state of an earlier response is cleared."""
        self.refused_permanently = self.may_be_partly_acceptable = False
        self.rejected = 0
        self.retry_after_seconds = 0.0
        self.explanation = ""
        timeout = options.get("timeout")
        limit_seconds = timeout if isinstance(timeout, int | float) else _READ_SECONDS
        self._deadline_seconds = time.monotonic() + limit_seconds
        return super().send(request, **options)

    def merge_environment_settings(
        self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
    ) -> Any:
        """Return a request's settings; the exporter's authority overrides the environment's.

        A collector on this machine is reached without the environment's proxy.
        """
        chosen = self.verify if verify is None else verify
        merged = super().merge_environment_settings(url, proxies, stream, chosen, cert)
        if is_loopback(urlsplit(url).hostname or ""):
            merged["proxies"] = {}
        return merged

    def _check(self, response: requests.Response, **arguments: object) -> None:
        status = response.status_code
        self.refused_permanently = status >= 300 and status not in _RETRYABLE
        self.may_be_partly_acceptable = status in _DUE_TO_CONTENT
        self.retry_after_seconds = _retry_after_seconds(response.headers)
        if 300 <= status < 400:
            response.close()  # its body is not read, so its connection would stay open
            raise RefusedError(f"answered {status}, a redirect: is the endpoint right?")
        is_whole = _read_in_part(response, self._deadline_seconds)
        content_type = response.headers.get("Content-Type", "")
        if status >= 400:
            self.explanation = _explanation(content_type, response.content)
        elif not is_whole:
            raise RefusedError("answered with something other than OTLP: is the endpoint right?")
        elif response.content:
            self._check_body(content_type, response.content)

    def _check_body(self, content_type: str, body: bytes) -> None:
        if content_type.startswith(_WEB_PAGE):
            raise RefusedError("answered with a web page: is the endpoint right?")
        if not content_type.startswith(_PROTOBUF):
            return
        make, rejected_field = _RESPONSES[self._signal]
        try:
            partial = make.FromString(body).partial_success
        except DecodeError:
            raise RefusedError("answered with something other than OTLP") from None
        if (rejected := getattr(partial, rejected_field)) > 0:
            # A retry would duplicate what was accepted.
            self.refused_permanently, self.rejected = True, rejected
            raise RefusedError(f"accepted all but {rejected}: {partial.error_message}")


def _read_in_part(response: requests.Response, deadline_seconds: float) -> bool:
    """Let a response have the beginning of its body as its content; return whether that is all."""
    read = getattr(response.raw, "read1", response.raw.read)
    packed = b""
    is_whole = False
    while len(packed) < ANSWER_BYTES_MAX and time.monotonic() < deadline_seconds:
        try:
            piece = read(_READ_BYTES, decode_content=False)
        except HTTPError as error:
            raise requests.ConnectionError(error) from error
        is_whole = not piece
        if is_whole:
            break
        packed += piece
    content = packed[:ANSWER_BYTES_MAX]
    if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        content, is_whole = _unpacked(content, is_whole=is_whole)
    if not is_whole:
        response.close()  # the rest stays unread
    response._content = content
    response._content_consumed = True
    return is_whole


def _unpacked(packed: bytes, *, is_whole: bool) -> tuple[bytes, bool]:
    """Return the beginning of what a body unpacks to, and whether that is all of an answer.

    It is not where the body is no zip, or a part of one.
    """
    unpacking = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        content = unpacking.decompress(packed, ANSWER_BYTES_MAX)
    except zlib.error:
        return b"", not packed
    return content, is_whole and (unpacking.eof or not packed)


def _retry_after_seconds(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After header; a date is left to the exporter."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0


def _explanation(content_type: str, body: bytes) -> str:
    """Return the text of an error's body in one line; nothing for a web page."""
    if content_type.startswith(_WEB_PAGE):
        return ""
    text = body.decode("utf-8", "replace")
    if content_type.startswith(_PROTOBUF):
        try:
            text = Status.FromString(body).message
        except DecodeError:
            return ""
    line = " ".join(text.split())[:_EXPLANATION_CHARACTERS_MAX]
    return "".join(character if character.isprintable() else "?" for character in line)


class HttpMetricExporter(OTLPMetricExporter):
    """Can also send points without a value, which end their series."""

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: object
    ) -> MetricExportResult:
        """Send; see the base class."""
        if isinstance(metrics_data, NoRecordedValues):
            return self._export_batch(flag_no_recorded_value(encode_metrics(metrics_data)))
        return super().export(metrics_data, timeout_millis)


_EXPORTERS: dict[OtlpSignal, Callable[..., OtlpExporter]] = {
    OtlpSignal.METRICS: HttpMetricExporter,
    OtlpSignal.LOGS: OTLPLogExporter,
    OtlpSignal.TRACES: OTLPSpanExporter,
}


def open_http_exporter(
    transport: OtlpTransport, timeout_seconds: float
) -> tuple[OtlpExporter, CheckedSession]:
    """Return an exporter, configured by the OTEL_* variables, and its session."""
    session = CheckedSession(transport.signal)
    # A session passed here would replace the one that a credential provider makes.
    passed = None if _has_credential_provider(transport.signal) else session
    return _EXPORTERS[transport.signal](session=passed, timeout=timeout_seconds), session


def _has_credential_provider(signal: OtlpSignal) -> bool:
    names = (
        "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
        f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{signal.value}_CREDENTIAL_PROVIDER",
    )
    return any(os.environ.get(name) for name in names)
