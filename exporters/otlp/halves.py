"""Cuts a refused request in two, so that what is refused for its own sake is found."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.sdk.metrics.export import Metric, MetricsData


def size_of(request: Any) -> int:
    """Return how many data points, log records or spans a request holds."""
    if isinstance(request, MetricsData):
        return sum(len(metric.data.data_points) for metric in _metrics(request))
    return len(request) if isinstance(request, Sequence) else 1


def halves(request: Any) -> tuple[Any, ...]:
    """Return two requests that together hold what a request of metrics holds; else none."""
    if not isinstance(request, MetricsData) or (size := size_of(request)) < 2:
        return ()
    return _part(request, 0, size // 2), _part(request, size // 2, size)


def _metrics(request: MetricsData) -> Sequence[Metric]:
    """Return the metrics of a request: all are of one resource and one scope."""
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    return scope.metrics


def _part(request: MetricsData, begin: int, end: int) -> MetricsData:
    """Return the points from `begin` to before `end`, as a request of the same kind."""
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
