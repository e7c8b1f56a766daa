"""Halves of a refused request."""

from typing import Any

from mp_agent.exporters.otlp import metrics_data
from mp_agent.exporters.otlp.metrics_data import Times, batches
from mp_agent.exporters.otlp.request_split import request_size, split_request
from mp_agent.exporters.otlp.resource import make_resource
from mp_agent.exporters.otlp.stale_series import NoRecordedValues
from tests.exporters.otlp.samples import everything


def test_halves_hold_every_point_once_and_are_of_the_same_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_data, "POINTS_MAX", 10**6)
    (whole,) = batches(everything(), Times(0, {}, {}), make_resource(tmp_path))
    gone = NoRecordedValues(whole.resource_metrics)

    assert [type(half) for half in split_request(gone)] == [NoRecordedValues] * 2
    pieces = [whole]
    while any(map(split_request, pieces)):
        pieces = [part for piece in pieces for part in (split_request(piece) or (piece,))]
    assert [request_size(piece) for piece in pieces] == [1] * request_size(whole)

    def points(requests: list[Any]) -> list[Any]:
        return [
            (metric.name, metric.unit, point)
            for request in requests
            for metric in request.resource_metrics[0].scope_metrics[0].metrics
            for point in metric.data.data_points
        ]

    assert points(pieces) == points([whole])
