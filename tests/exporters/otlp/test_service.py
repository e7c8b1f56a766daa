"""The service against a receiver that takes everything."""

import logging
import os

import pytest

from mp_agent.exporters.otlp.environment import LOGGERS
from mp_agent.exporters.otlp.events import instance_id
from tests.exporters.otlp.samples import (
    BORN_UNIX_NS,
    event,
    everything,
    snapshot,
    steps,
)
from tests.exporters.otlp.service_loop import started
from tests.exporters.otlp.test_metrics_data import many_layers
from tests.exporters.otlp.test_parity import scraped
from tests.exporters.otlp.translation import attributes_of, labels, stored

STEPS = ("mp_agent_steps_total", labels({"run": "llama"}))


def test_a_snapshot_arrives_whole_with_its_resource_and_scope(receiver, tmp_path):
    with started(tmp_path) as loop:
        loop.push(everything())

    assert stored(receiver.messages()) == scraped(everything())
    (resource,) = receiver.messages()[0].resource_metrics
    attributes = attributes_of(resource.resource)
    assert attributes["service.instance.id"] == instance_id(tmp_path)
    assert attributes["process.pid"] == os.getpid()
    assert resource.scope_metrics[0].scope.name == "mp_agent"
    assert loop.delivered == 1
    assert loop.account().failures == 0


def test_pushes_come_at_the_interval_and_carry_what_was_counted(receiver, tmp_path):
    with started(tmp_path) as loop:
        loop.push(steps(1.0))
        loop.now += 14.9
        loop.tick()
        assert len(receiver.posted) == 1
        loop.push(steps(5.0), after_seconds=0.2)

    assert [stored([message])[STEPS] for message in receiver.messages()] == [1.0, 5.0]
    starts = {
        m.sum.data_points[0].start_time_unix_nano
        for message in receiver.messages()
        for m in message.resource_metrics[0].scope_metrics[0].metrics
    }
    assert starts == {BORN_UNIX_NS}


def test_an_end_is_pushed_without_waiting_for_the_interval(receiver, tmp_path):
    with started(tmp_path) as loop:
        loop.push(steps(1.0))
        loop.service.push_metrics_soon()
        loop.push(steps(2.0), after_seconds=0.1)
    assert len(receiver.messages()) == 2


def test_nothing_is_pushed_while_there_is_nothing(receiver, tmp_path):
    with started(tmp_path) as loop:
        loop.shown = snapshot()
        for _ in range(5):
            loop.now += 60
            loop.tick()
        assert loop.stop() < 5
    assert receiver.posted == []
    assert loop.account().last_success_unix_seconds is None


def test_the_last_state_is_pushed_at_the_end(receiver, tmp_path):
    with started(tmp_path) as loop:
        loop.push(steps(1.0))
        loop.shown = steps(9.0)
        assert loop.stop() < 5
    assert stored(receiver.messages()) == {STEPS: 9.0}
    assert loop.delivered == 2


def test_the_loggers_are_given_back_at_the_end(receiver, tmp_path):
    with started(tmp_path) as loop:
        assert not logging.getLogger("opentelemetry").propagate
        loop.push(steps(1.0))
        loop.stop()
        assert all(logging.getLogger(name).propagate for name in LOGGERS)


def test_runs_that_are_over_leave_no_series_behind(receiver, tmp_path):
    with started(tmp_path) as loop:
        loop.push(everything())
        loop.shown = snapshot()
        loop.stop()
    assert stored(receiver.messages()) == {}


def test_five_thousand_layers_arrive_at_once(receiver, tmp_path):
    with started(tmp_path) as loop:
        loop.push(many_layers(5000))

    series = stored(receiver.messages())
    layers = {dict(own).get("layer") for _, own in series}
    assert len(series) == 5001 and len(layers) == 5001
    assert not [
        posted for posted in receiver.posted if b"overflow" in posted.message.SerializeToString()
    ]


@pytest.mark.parametrize("compression", ["gzip", "deflate", "none"])
def test_headers_and_compression_of_the_environment_are_used(
    compression, receiver, tmp_path, monkeypatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=all,x-a=b%20c")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "api-key=own")
    with started(tmp_path) as loop:
        loop.push()
    (posted,) = receiver.accepted
    assert posted.path == "/v1/metrics"
    assert posted.headers["api-key"] == "own"
    assert posted.headers.get("content-encoding", "none") == compression


def test_a_signals_own_endpoint_is_taken_as_it_is(receiver, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{receiver.url}/otlp/metrics")
    with started(tmp_path) as loop:
        loop.push()
    assert receiver.accepted[0].path == "/otlp/metrics"


def test_critical_conditions_go_out_at_once_as_logs_and_on_request_as_spans(receiver, tmp_path):
    with started(tmp_path, span_events=True) as loop:
        loop.service.on_condition(event())
        loop.service.on_condition(event(severity="warning"))
        loop.settle("otlp_logs", 1)
        loop.settle("otlp_spans", 1)
        loop.service.on_condition(event("resolved"))
        loop.settle("otlp_logs", 2)

    records = [
        record
        for message in receiver.messages("logs")
        for record in message.resource_logs[0].scope_logs[0].log_records
    ]
    assert [attributes_of(record)["state"] for record in records] == ["firing", "resolved"]
    assert attributes_of(receiver.messages("logs")[0].resource_logs[0].resource)["host.name"]
    assert receiver.messages("traces")


def test_spans_are_not_sent_unless_asked_for(receiver, tmp_path):
    with started(tmp_path) as loop:
        loop.service.on_condition(event())
        loop.settle("otlp_logs", 1)
        loop.stop()
    assert receiver.messages("traces") == []
    assert [account.exporter for account in loop.service.accounts] == ["otlp", "otlp_logs"]


def test_an_event_of_the_last_moment_is_sent_at_the_end(receiver, tmp_path):
    with started(tmp_path) as loop:
        loop.service.on_condition(event())
        loop.stop()
    assert len(receiver.messages("logs")) == 1


def test_signals_that_are_switched_off_are_not_sent(receiver, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with started(tmp_path) as loop:
        loop.service.on_condition(event())
        loop.settle("otlp_logs", 1)
        loop.service.push_metrics_soon()
        loop.stop()
    assert not loop.service.pushes_metrics
    assert receiver.messages() == []


def test_a_forked_child_pushes_nothing(receiver, tmp_path):
    with started(tmp_path) as loop:
        loop.push()
        before = len(receiver.posted)
        pid = os.fork()
        if pid == 0:
            loop.now += 60
            loop.tick()
            begun = any(pusher.busy for pusher in loop.service._pushers.values())
            loop.stop()
            os._exit(begun)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(receiver.posted) == before
        loop.push(steps(2.0))
    assert stored(receiver.messages()) == {STEPS: 2.0}
    resources = {
        attributes_of(message.resource_metrics[0].resource)["service.instance.id"]
        for message in receiver.messages()
    }
    assert len(resources) == 1
