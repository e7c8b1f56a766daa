import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.resources import Resource

from mp_agent.exporters.otlp import stale_series
from mp_agent.exporters.otlp.client import ExportError
from mp_agent.exporters.otlp.signal_pusher import MetricSource
from mp_agent.exporters.otlp.stale_series import (
    NoRecordedValues,
    SentSeries,
    flag_no_recorded_value,
)
from tests.exporters.otlp.samples import (
    DURATION,
    PHASE,
    batch_of,
    duration,
    everything,
    family,
    snapshot,
    steps,
)
from tests.exporters.otlp.translation import stored


class Source:
    """A metric source whose pushes all end up in `requests`."""

    def __init__(self) -> None:
        self.shown = snapshot()
        self.requests: list[ExportMetricsServiceRequest] = []
        self.source = MetricSource(lambda: batch_of(self.shown), Resource({}))

    def push(self, shown, error: ExportError | None = None) -> bool:
        """Push a snapshot; with an error it arrives all the same, and is not acknowledged."""
        self.shown = shown
        make = self.source.next_push()
        if make is None:
            return False
        for data in make():
            request = encode_metrics(data)
            self.requests.append(
                flag_no_recorded_value(request) if isinstance(data, NoRecordedValues) else request
            )
        self.source.settle(error)
        return True

    @property
    def names(self) -> set[str]:
        return {name for name, _ in stored(self.requests)}


def phase(name: str):
    return snapshot(family(PHASE, (("llama", name), 1.0)))


def test_a_series_that_is_gone_is_current_no_more():
    source = Source()
    source.push(phase("forward"))
    source.push(phase("backward"))

    ((_, labels),) = stored(source.requests)
    assert dict(labels)["phase"] == "backward"


def test_every_sort_of_series_can_vanish_and_come_back():
    source = Source()
    source.push(everything())
    before = stored(source.requests)
    assert source.push(snapshot())
    assert stored(source.requests) == {}
    source.push(everything())
    assert stored(source.requests) == before


def test_what_vanished_is_said_once():
    source = Source()
    source.push(everything())
    assert source.push(snapshot())
    assert not source.push(snapshot())


def test_what_may_have_arrived_is_taken_back_until_that_is_acknowledged():
    source, failed = Source(), ExportError("no answer")
    source.push(phase("forward"), failed)
    source.push(phase("backward"), failed)
    source.push(phase("optimizer"), failed)
    assert len(stored(source.requests)) == 1
    source.push(steps(1.0))
    assert source.names == {"mp_agent_steps_total"}


def test_points_without_value_have_the_flag_and_no_value():
    source = Source()
    source.push(snapshot(family(DURATION, (("llama",), duration(1))), *steps(1.0).families))
    del source.requests[:]
    source.push(snapshot())
    (request,) = source.requests
    histogram, counter = request.resource_metrics[0].scope_metrics[0].metrics
    (point,) = counter.sum.data_points
    assert (point.flags, point.WhichOneof("value")) == (1, None)
    (point,) = histogram.histogram.data_points
    assert (point.flags, point.count, point.sum) == (1, 0, 0.0)
    assert point.HasField("sum")
    assert tuple(point.explicit_bounds) == DURATION.bounds


@pytest.mark.parametrize("pushes", [50])
def test_an_endpoint_that_never_answers_does_not_fill_the_memory(pushes, monkeypatch):
    monkeypatch.setattr(stale_series, "_REMEMBERED_MAX", 10)
    sent = SentSeries()
    for number in range(pushes):
        sent.pushed(phase(str(number)), delivered=False)
    assert len(sent.stale(snapshot()).families[0].samples) == 10
