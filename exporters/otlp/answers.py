"""The session of the official exporters over HTTP: it knows a refusal when it gets one.

They count every status below 400 as delivered and do not look at the body, so that a redirect to
a login page, or an answer that says how much was rejected, would pass for success. Besides, a
session that is not told better prefers REQUESTS_CA_BUNDLE to OTEL_EXPORTER_OTLP_CERTIFICATE.
"""

from collections.abc import Mapping
from typing import Any

import requests
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from mp_agent.exporters.otlp.environment import OtlpSignal

_RESPONSES: dict[OtlpSignal, tuple[Any, str]] = {
    OtlpSignal.METRICS: (ExportMetricsServiceResponse, "rejected_data_points"),
    OtlpSignal.LOGS: (ExportLogsServiceResponse, "rejected_log_records"),
    OtlpSignal.TRACES: (ExportTraceServiceResponse, "rejected_spans"),
}
_PROTOBUF = "application/x-protobuf"
_WEB_PAGE = "text/html"
_EXPLANATION_CHARACTERS_MAX = 200
_MAY_CHANGE = {429, 502, 503, 504}
"""Statuses after which the same request may be sent again; after no other, says OTLP/HTTP."""
_OF_THE_CONTENT = {400, 413, 422}
"""Statuses that may be due to a part of what was sent."""


class RefusedError(requests.RequestException):
    """The other side answered, and did not take what was sent."""


class CheckedSession(requests.Session):
    """A session that raises RefusedError for an answer that is a refusal in a 2xx or 3xx coat."""

    def __init__(self, signal: OtlpSignal) -> None:
        super().__init__()
        self._signal = signal
        self.refused_for_good = False
        """Whether the last answer says that sending the same again is of no use."""
        self.perhaps_in_part = False
        """Whether it may say so because of a part of what was sent."""
        self.rejected = 0
        """How many points, records or spans the last answer rejects of a request that was taken."""
        self.retry_after_seconds = 0.0
        """How long the last answer asks to wait."""
        self.explanation = ""
        """What the last answer says of its error, besides the status."""
        self.hooks["response"].append(self._check)

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send; without an answer nothing of an earlier one holds any more."""
        self.refused_for_good = self.perhaps_in_part = False
        self.rejected = 0
        self.retry_after_seconds = 0.0
        self.explanation = ""
        return super().send(request, **options)

    def merge_environment_settings(
        self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
    ) -> Any:
        """Return settings of a request; the exporter's authority wins over the environment's."""
        chosen = self.verify if verify is None else verify
        return super().merge_environment_settings(url, proxies, stream, chosen, cert)

    def _check(self, response: requests.Response, **arguments: object) -> None:
        status = response.status_code
        self.refused_for_good = status >= 300 and status not in _MAY_CHANGE
        self.perhaps_in_part = status in _OF_THE_CONTENT
        self.retry_after_seconds = _retry_after_seconds(response.headers)
        if 300 <= status < 400:
            response.close()  # its body is not read, so its connection would stay open
            raise RefusedError(f"answered {status}, a redirect: is the endpoint right?")
        content_type = response.headers.get("Content-Type", "")
        if status >= 400:
            self.explanation = _explanation(content_type, response.content)
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
            raise RefusedError("answered with what is no OTLP") from None
        if rejected := getattr(partial, rejected_field):
            # What was taken would be there twice.
            self.refused_for_good, self.rejected = True, rejected
            raise RefusedError(f"took all but {rejected}: {partial.error_message}")


def _retry_after_seconds(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After header; a date in it is left to the exporter."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0


def _explanation(content_type: str, body: bytes) -> str:
    """Return in one line what the body of an error says; a web page says nothing."""
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
