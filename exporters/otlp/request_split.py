"""Splits a refused request in two, to isolate the points that cause the refusal."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.sdk.metrics.export import Metric, MetricsData


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
