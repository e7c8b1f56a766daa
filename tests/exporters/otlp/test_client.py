"""Endpoints that refuse a part of what is pushed: the rest arrives, and what was refused counts."""

import time
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceResponse,
)

from mp_agent.exporters.otlp import events
from mp_agent.exporters.otlp.client import SPLITS_WITHOUT_SUCCESS_MAX, request_size, split_request
from mp_agent.exporters.otlp.events import Times, batches, make_resource
from mp_agent.exporters.otlp.stale_series import NoRecordedValues
from tests.exporters.otlp.grpc_collector import grpc_collector
from tests.exporters.otlp.receiver import Answer, Posted
from tests.exporters.otlp.samples import event, everything, snapshot, steps
from tests.exporters.otlp.service_loop import started
from tests.exporters.otlp.test_database import now
from tests.exporters.otlp.test_metrics_data import many_layers
from tests.exporters.otlp.translation import attributes_of, stored
from tests.subtests import each
from tests.waiting import wait_until
from tools.servers.victoria import victoria_metrics

LAYERS = 4500
BAD = frozenset(f"model.layers.{index}.weight" for index in (0, 1, 700, 2999, 3998))


def bad_points(message: Any) -> int:
    """Return how many points of a request are of the layers that a picky endpoint refuses."""
    return sum(
        attributes_of(point).get("layer") in BAD
        for resource in message.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in getattr(metric, metric.WhichOneof("data")).data_points
    )


def refuse_whole(posted: Posted) -> Answer | None:
    return Answer(status=400) if bad_points(posted.message) else None


def layers_of(requests: list[Any]) -> set[str]:
    return {dict(key[1])["layer"] for key in stored(requests) if "layer" in dict(key[1])}


def test_halves_hold_every_point_once_and_are_of_the_same_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "POINTS_MAX", 10**6)
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


def test_what_is_rejected_of_one_request_costs_no_other_request(receiver, tmp_path, caplog):
    def take_the_rest(posted: Posted) -> Answer | None:
        if not (rejected := bad_points(posted.message)):
            return None
        receiver.accepted.append(posted)
        partial = ExportMetricsPartialSuccess(rejected_data_points=rejected, error_message="no")
        response = ExportMetricsServiceResponse(partial_success=partial)
        return Answer(body=response.SerializeToString())

    receiver.judge = take_the_rest
    with started(tmp_path) as loop:
        for pushes in (1, 2):
            receiver.accepted.clear()
            loop.push(many_layers(LAYERS))
            assert len(layers_of(receiver.messages())) == LAYERS
            account = loop.account()
            assert (account.failures, account.rejected) == (pushes, 5 * pushes)
        assert loop.delivered == 2, "there is nothing more to be had"
    assert len(receiver.posted) == 4, "what was taken is not sent again"
    assert "5 items of a push were refused" in caplog.text


@pytest.mark.slow
def test_a_request_that_is_refused_as_a_whole_loses_only_what_it_was_refused_for(
    receiver, tmp_path
):
    receiver.judge = refuse_whole
    with started(tmp_path) as loop:
        loop.push(many_layers(LAYERS))
        assert loop.account().rejected == 5
        assert loop.account().last_success_unix_seconds is not None
        expected = {f"model.layers.{index}.weight" for index in range(LAYERS)} - BAD
        assert layers_of(receiver.messages()) == expected
        loop.push(steps(4.0))
        assert {name for name, _ in stored(receiver.messages())} == {"mp_agent_steps_total"}


def test_an_endpoint_that_refuses_everything_is_not_asked_about_every_point(receiver, tmp_path):
    receiver.judge = lambda posted: Answer(status=400)
    with started(tmp_path) as loop:
        loop.push(many_layers(LAYERS))
        first = len(receiver.posted)
        assert first <= 2 + 2 * SPLITS_WITHOUT_SUCCESS_MAX
        assert loop.account().rejected == LAYERS + 1
        loop.push(many_layers(LAYERS))
        assert len(receiver.posted) == first + 2, "and at the next push once per request"
        receiver.judge = lambda posted: None
        loop.push(many_layers(LAYERS))
        assert loop.outcomes("otlp") == (2, 1)


@pytest.mark.parametrize("status", [408, 500, 501, 505])
def test_an_event_answered_by_what_is_not_to_be_repeated_is_sent_once(status, receiver, tmp_path):
    receiver.judge = lambda posted: Answer(status=status) if "logs" in posted.path else None
    with started(tmp_path) as loop:
        loop.service.on_condition(event(at=time.time()))
        loop.settle("otlp_logs", 1)
        for _ in range(5):
            loop.now += 60
            loop.tick()
        loop.push()
        assert len([p for p in receiver.posted if "logs" in p.path]) == 1
        assert loop.account("otlp_logs").rejected == 1


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_event_answered_by_what_may_pass_is_sent_again(status, receiver, tmp_path):
    receiver.judge = lambda posted: Answer(status=status) if "logs" in posted.path else None
    with started(tmp_path) as loop:
        loop.service.on_condition(event(at=time.time()))
        loop.settle("otlp_logs", 1)
        receiver.judge = lambda posted: None
        loop.now += 60
        loop.settle("otlp_logs", 2)
    assert len(receiver.messages("logs")) == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_a_retry_info_is_heeded(code, tmp_path, monkeypatch):
    with grpc_collector() as collector:
        _push_by_grpc(monkeypatch, collector.url)
        with started(tmp_path) as loop:
            collector.status, collector.retry_seconds = code, 120
            loop.push(steps(1.0))
            collector.status = None
            loop.now += 100
            for _ in range(5):
                loop.tick()
            assert len(collector.metadata) == 1
            loop.push(steps(2.0), after_seconds=21)
        assert loop.outcomes("otlp") == (1, 1)
        assert loop.account().rejected == 0


def test_exhausted_without_a_retry_info_is_not_repeated(tmp_path, monkeypatch):
    with grpc_collector() as collector:
        _push_by_grpc(monkeypatch, collector.url)
        with started(tmp_path) as loop:
            collector.status = grpc.StatusCode.RESOURCE_EXHAUSTED
            loop.push(steps(1.0))
            assert loop.account().rejected == 1
            assert len(collector.metadata) == 1
            assert collector.metrics == []


def test_an_answer_that_is_too_large_to_be_read_is_no_refusal(tmp_path, monkeypatch):
    with grpc_collector() as collector:
        _push_by_grpc(monkeypatch, collector.url)
        with started(tmp_path) as loop:
            collector.explanation = "x" * (1 << 17)
            loop.push(steps(1.0))
            assert loop.account().failures == 1
            assert loop.account().rejected == 0
            assert len(collector.metadata) == 1


@each("seconds", [-1, 0])
def test_a_delay_of_nothing_does_not_cause_a_burst_of_retries(seconds, tmp_path, monkeypatch):
    with grpc_collector() as collector:
        _push_by_grpc(monkeypatch, collector.url)
        with started(tmp_path) as loop:
            collector.status = grpc.StatusCode.RESOURCE_EXHAUSTED
            collector.retry_seconds = seconds
            loop.push(steps(1.0))
            assert len(collector.metadata) == 1
            assert loop.account().rejected == 0
            assert loop.account().failures == 1


def _push_by_grpc(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")


@pytest.mark.e2e
def test_a_database_behind_a_picky_gateway_has_every_other_series(
    server, receiver, tmp_path, monkeypatch
):
    with victoria_metrics(server("victoria-metrics"), tmp_path) as database:

        def forward(posted: Posted) -> Answer | None:
            if answer := refuse_whole(posted):
                return answer
            urllib.request.urlopen(
                urllib.request.Request(
                    f"{database.url}/opentelemetry/v1/metrics",
                    posted.message.SerializeToString(),
                    {"Content-Type": "application/x-protobuf"},
                )
            ).close()
            return None

        receiver.judge = forward
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
        with started(tmp_path) as loop:
            loop.push(now(many_layers(LAYERS)))
            assert loop.account().rejected == 5
            expression = 'count({__name__="mp_agent_layer_grad_norm"})'
            found: Callable[[], list[dict[str, Any]]] = lambda: database.query(expression)  # noqa: E731
            (row,) = wait_until(found, what="the series")
            assert float(row["value"][1]) == LAYERS - len(BAD)
            assert database.query("mp_agent_steps_total")
            loop.push(now(snapshot()))
            wait_until(lambda: not found(), what="the end of all series")
