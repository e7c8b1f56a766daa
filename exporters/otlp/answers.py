"""Answers over HTTP that are no success, whatever the official exporters take them for.

They count every status below 400 as delivered and do not look at the body, so that a redirect to
a login page, or an answer that says how much was rejected, would pass for success.
"""

from collections.abc import Mapping
from typing import Any

import requests
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from mp_agent.exporters.otlp.environment import Signal

_RESPONSES: dict[Signal, tuple[Any, str]] = {
    Signal.METRICS: (ExportMetricsServiceResponse, "rejected_data_points"),
    Signal.LOGS: (ExportLogsServiceResponse, "rejected_log_records"),
    Signal.TRACES: (ExportTraceServiceResponse, "rejected_spans"),
}
_MAY_CHANGE = {408, 429}
"""Statuses of the 4xx range after which the same request may be accepted later."""


class RefusedError(requests.RequestException):
    """The other side answered, and did not take what was sent."""


class CheckedSession(requests.Session):
    """A session that raises RefusedError for an answer that is a refusal in a 2xx or 3xx coat."""

    def __init__(self, signal: Signal) -> None:
        super().__init__()
        self._signal = signal
        self.refused_for_good = False
        """Whether the last answer says that sending the same again is of no use."""
        self.retry_after_seconds = 0.0
        """How long the last answer asks to wait."""
        self.hooks["response"].append(self._check)

    def _check(self, response: requests.Response, **arguments: object) -> None:
        status = response.status_code
        self.refused_for_good = 300 <= status < 500 and status not in _MAY_CHANGE
        self.retry_after_seconds = _retry_after_seconds(response.headers)
        if 300 <= status < 400:
            raise RefusedError(f"answered {status}, a redirect: is the endpoint right?")
        if status < 300 and response.content:
            self._check_body(response.headers.get("Content-Type", ""), response.content)

    def _check_body(self, content_type: str, body: bytes) -> None:
        if content_type.startswith("text/html"):
            raise RefusedError("answered with a web page: is the endpoint right?")
        if not content_type.startswith("application/x-protobuf"):
            return
        make, rejected_field = _RESPONSES[self._signal]
        try:
            partial = make.FromString(body).partial_success
        except DecodeError:
            raise RefusedError("answered with what is no OTLP") from None
        if rejected := getattr(partial, rejected_field):
            raise RefusedError(f"took all but {rejected}: {partial.error_message}")


def _retry_after_seconds(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After header; a date in it is left to the exporter."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0
