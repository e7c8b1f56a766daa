"""OTLP over gRPC, received with the protocol's own service classes."""

import os
import socket
import sys
import time
from collections.abc import Iterator

import grpc
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from mp_agent.catalog.metric import Kind
from mp_agent.catalog.metrics import METRICS
from mp_agent.exporters.otlp.client import ExportError
from mp_agent.exporters.otlp.environment import (
    LogCapture,
    OtlpSignal,
    Redactor,
    read_environment,
)
from mp_agent.exporters.otlp.events import (
    PROCESS_METRICS,
    Times,
    batches,
    log_records,
    make_resource,
)
from mp_agent.exporters.otlp.service import open_client
from mp_agent.version import __version__
from tests.exporters.otlp.grpc_collector import Collector, grpc_collector
from tests.exporters.otlp.samples import BORN_UNIX_NS, NOW, event, everything, snapshot, steps
from tests.exporters.otlp.service_loop import started
from tests.exporters.otlp.test_metrics_data import many_layers
from tests.exporters.otlp.test_parity import scraped
from tests.exporters.otlp.translation import attributes_of, stored


@pytest.fixture
def collector(monkeypatch) -> Iterator[Collector]:
    with grpc_collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        yield running


def test_without_grpc_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "mp_agent.exporters.otlp.grpc_exporters", raising=False)
    environment = read_environment({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    transport = environment.transports[OtlpSignal.METRICS]
    with pytest.raises(ExportError, match=r"no exporter for metrics: .*mp-agent\[otlp-grpc\]"):
        open_client(transport, LogCapture(Redactor({})))


def test_resource_scope_temporality_times_units_and_descriptions(collector, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=ml")
    with started(tmp_path) as loop:
        loop.push(everything())

    (request,) = collector.metrics
    (resource,) = request.resource_metrics
    attributes = attributes_of(resource.resource)
    assert {"host.name", "service.instance.id", "service.version"} <= set(attributes)
    assert (attributes["service.name"], attributes["service.namespace"]) == ("mp-agent", "ml")
    assert attributes["process.pid"] == os.getpid()
    (scope,) = resource.scope_metrics
    assert (scope.scope.name, scope.scope.version) == ("mp_agent", __version__)

    received = {metric.name: metric for metric in scope.metrics}
    assert set(received) == {metric.name for metric in METRICS}
    for metric in METRICS:
        found = received[metric.name]
        assert (found.unit, found.description) == (metric.unit, metric.help)
        kind = found.WhichOneof("data")
        expected = {Kind.COUNTER: "sum", Kind.HISTOGRAM: "histogram"}.get(metric.kind, "gauge")
        assert kind == expected, metric.name
        for point in getattr(found, kind).data_points:
            assert point.time_unix_nano == NOW * 10**9
            if kind != "gauge":
                of_the_process = metric.name in PROCESS_METRICS
                assert (point.start_time_unix_nano == BORN_UNIX_NS) is not of_the_process
        if kind != "gauge":
            temporality = getattr(found, kind).aggregation_temporality
            assert temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
        if kind == "sum":
            assert found.sum.is_monotonic
        if kind == "histogram":
            assert tuple(found.histogram.data_points[0].explicit_bounds) == metric.bounds
    assert stored(collector.metrics) == scraped(everything())


@pytest.mark.parametrize("compression", ["none", "gzip", "deflate"])
def test_headers_are_sent_and_every_compression_of_the_specification_works(
    compression, collector, tmp_path, monkeypatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=own")
    with started(tmp_path) as loop:
        loop.push()
    assert loop.account().failures == 0
    assert collector.metadata[0]["api-key"] == "own"


def test_five_thousand_layers_and_more_fit_a_servers_default_limit(collector, tmp_path):
    with started(tmp_path) as loop:
        loop.push(many_layers(20_000))
    assert loop.account().failures == 0
    assert len(stored(collector.metrics)) == 20_001
    assert len(collector.metrics) == 6


def test_what_vanished_is_flagged(collector, tmp_path):
    with started(tmp_path) as loop:
        loop.push(everything())
        loop.push(snapshot())
    assert stored(collector.metrics) == {}
    assert loop.account().failures == 0


def test_a_partial_success_is_a_failure(collector, tmp_path, caplog):
    collector.rejected = 3
    with started(tmp_path) as loop:
        loop.push()
    assert loop.account().failures == 1
    assert "accepted all but 3: too old" in caplog.text


@pytest.mark.parametrize(
    "status", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED]
)
def test_a_failure_is_counted_and_the_next_push_has_everything(status, collector, tmp_path):
    collector.status = status
    with started(tmp_path) as loop:
        loop.push(steps(1.0))
        assert loop.account().failures == 1
        collector.status = None
        loop.push(steps(2.0))
    assert list(stored(collector.metrics).values()) == [2.0]


def test_events_are_logs_here_too_and_unknown_services_are_not_asked_again(collector, tmp_path):
    with started(tmp_path) as loop:
        loop.service.on_condition(event(at=time.time()))
        loop.settle("otlp_logs", 1)
        assert len(collector.logs) == 1
        collector.status = grpc.StatusCode.UNIMPLEMENTED
        loop.service.on_condition(event("resolved", at=time.time()))
        loop.settle("otlp_logs", 2)
        loop.now += 60
        loop.tick()
        loop.come_to_rest()
        assert collector.log_attempts == 2


def test_an_endpoint_that_is_down_delays_no_end(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    with started(tmp_path) as loop:
        loop.tick()
        assert loop.stop(seconds=0.5) < 2.5
    assert loop.account().failures >= 1


def test_each_signal_says_why_it_fails_each_time(collector, tmp_path):
    environment, capture = read_environment(os.environ), LogCapture(Redactor({}))
    resource = make_resource(tmp_path)
    (metrics,) = batches(steps(1.0), Times(0, {}, {}), resource)
    sent = {OtlpSignal.METRICS: metrics, OtlpSignal.LOGS: log_records([event()], resource)}
    capture.install()
    try:
        for status in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            collector.status = status
            for signal, request in sent.items():
                client = open_client(environment.transports[signal], capture)
                with pytest.raises(ExportError, match=status.name):
                    client.send([request], limit_seconds=5.0)
                client.close()
    finally:
        capture.remove()


def test_a_collector_on_this_machine_gets_pushes_whatever_proxy_there_is(
    collector, tmp_path, monkeypatch
):
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with started(tmp_path) as loop:
        loop.push()
    assert loop.account().failures == 0 and len(collector.metrics) == 1
