"""Sends batches by an official exporter, within a limit of time, and splits what is refused."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from opentelemetry.sdk.metrics.export import Metric, MetricsData

from mp_agent.errors import MpAgentError
from mp_agent.exporters.otlp.environment import LogCapture


class ExportError(MpAgentError):
    """A push was not delivered, or not completely; the message holds no secret."""

    def __init__(
        self,
        reason: str,
        *,
        permanent: bool = False,
        retry_after_seconds: float = 0.0,
        rejected: int = 0,
        partial_success: bool = False,
    ) -> None:
        super().__init__(reason)
        self.permanent = permanent
        """Whether every request was answered, and sending the same again cannot succeed."""
        self.retry_after_seconds = retry_after_seconds
        self.rejected = rejected
        """Data points, log records or spans that were refused permanently."""
        self.partial_success = partial_success
        """Whether everything that was not refused permanently arrived, and that is not nothing."""


class OtlpExporter(Protocol):
    """What the official exporters have in common."""

    def export(self, data: Any, /) -> Any:
        """Send, retry what may succeed on retry, and return an enum with SUCCESS."""

    def shutdown(self) -> None:
        """Abort pending retries, and close the connection."""


class OtlpResponse(Protocol):
    """What an exporter's connection knows of the last response."""

    refused_permanently: bool
    """Whether sending the same request again cannot succeed."""
    may_be_partly_acceptable: bool
    """Whether the request was refused as a whole, and a part of it may be accepted."""
    rejected: int
    """How many items were rejected of a request that was otherwise accepted."""
    retry_after_seconds: float
    explanation: str


SPLITS_MAX = 200
SPLITS_WITHOUT_SUCCESS_MAX = 16
"""Requests that one push splits at most, once anything was accepted and while nothing was."""


@dataclass(slots=True)
class _PushOutcome:
    """What became of the requests of one push."""

    any_accepted: bool = False
    rejected: int = 0
    splits: int = 0
    problem: str = ""
    """The reason given for the first refusal."""
    retry_after_seconds: float = 0.0

    def add_refusal(self, rejected: int, problem: str, retry_after_seconds: float) -> None:
        self.rejected += rejected
        self.problem = self.problem or problem
        self.retry_after_seconds = max(self.retry_after_seconds, retry_after_seconds)


class Client:
    """Sends one signal. The exporter's own error messages are kept out of the logs."""

    def __init__(self, exporter: OtlpExporter, response: OtlpResponse, capture: LogCapture) -> None:
        """response: updated by the exporter's connection with each response."""
        self._exporter = exporter
        self._response = response
        self._capture = capture
        self._may_split = True
        """Whether anything was accepted in the last push; true before the first."""

    def send(self, requests: Iterable[Any], *, limit_seconds: float) -> None:
        """Send the requests one after another; raise ExportError if not everything arrived.

        A permanent refusal is counted, and the next request is sent: one point that the endpoint
        rejects costs no other. A request of metrics that is refused as a whole is split in halves
        until the offending points are found. Any other failure ends the push. No request starts
        after `limit_seconds`.
        """
        deadline_seconds = time.monotonic() + limit_seconds
        outcome = _PushOutcome()
        self._capture.pop()
        for request in requests:
            pending = [request]
            while pending:
                if time.monotonic() > deadline_seconds:
                    problem = f"not everything was sent within {limit_seconds:g} s"
                    raise ExportError(problem, rejected=outcome.rejected)
                pending.extend(reversed(self._send_one(pending.pop(), outcome)))
        # Messages of requests that arrived on a retry.
        self._capture.pop()
        self._may_split = outcome.any_accepted
        if outcome.problem:
            raise ExportError(
                outcome.problem,
                permanent=True,
                retry_after_seconds=outcome.retry_after_seconds,
                rejected=outcome.rejected,
                partial_success=outcome.any_accepted,
            )

    def _send_one(self, request: Any, outcome: _PushOutcome) -> tuple[Any, ...]:
        """Send one request; return the parts to send instead, usually none."""
        problem = ""
        try:
            result = self._exporter.export(request)
        except Exception as error:
            result, problem = None, self._capture.redact(f"{type(error).__name__}: {error}")
        if getattr(result, "name", "") == "SUCCESS":
            outcome.any_accepted = True
            return ()
        response = self._response
        explanation = self._capture.redact(response.explanation)
        problem = _joined(problem, self._capture.pop(), explanation) or "refused"
        if not response.refused_permanently:
            raise ExportError(
                problem,
                retry_after_seconds=response.retry_after_seconds,
                rejected=outcome.rejected,
            )
        parts = self._parts(request, outcome) if response.may_be_partly_acceptable else ()
        size = request_size(request)
        rejected = min(response.rejected, size) or size
        outcome.any_accepted |= rejected < size
        outcome.add_refusal(
            0 if parts else rejected,
            problem,
            response.retry_after_seconds,
        )
        return parts

    def _parts(self, request: Any, outcome: _PushOutcome) -> tuple[Any, ...]:
        """Return the halves of a refused request, unless this push has split too many already.

        An endpoint that accepts nothing must not be asked about every point, nor at every push.
        """
        limit = SPLITS_MAX if outcome.any_accepted else SPLITS_WITHOUT_SUCCESS_MAX
        if outcome.splits >= limit or not (self._may_split or outcome.any_accepted):
            return ()
        outcome.splits += 1
        return split_request(request)

    def close(self) -> None:
        """Close the connection; pending retries are aborted."""
        self._exporter.shutdown()
        self._capture.pop()


def _joined(*texts: str) -> str:
    return "; ".join(filter(None, texts))


def request_size(request: Any) -> int:
    """Return the number of data points, log records or spans in a request."""
    if isinstance(request, MetricsData):
        return sum(len(metric.data.data_points) for metric in _metrics(request))
    return len(request) if isinstance(request, Sequence) else 1


def split_request(request: Any) -> tuple[Any, ...]:
    """Return a metrics request as two that hold half of its points each; nothing for others."""
    if not isinstance(request, MetricsData) or (size := request_size(request)) < 2:
        return ()
    return _part(request, 0, size // 2), _part(request, size // 2, size)


def _metrics(request: MetricsData) -> Sequence[Metric]:
    """Return the metrics of a request, which has one resource and one scope."""
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    return scope.metrics


def _part(request: MetricsData, begin: int, end: int) -> MetricsData:
    """Return points `begin` to `end` (exclusive), as a request of the same type."""
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    metrics, passed = [], 0
    for metric in scope.metrics:
        data: Any = metric.data
        points = data.data_points
        chosen = points[max(begin - passed, 0) : max(end - passed, 0)]
        passed += len(points)
        if chosen:
            metrics.append(replace(metric, data=replace(data, data_points=chosen)))
    scope = replace(scope, metrics=metrics)
    return type(request)([replace(resource, scope_metrics=[scope])])
