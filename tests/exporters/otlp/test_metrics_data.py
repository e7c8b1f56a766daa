import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.resources import Resource

from mp_agent.catalog.metric import Family, Sample, Snapshot
from mp_agent.exporters.otlp import events
from mp_agent.exporters.otlp.events import Times, batches
from tests.exporters.otlp.samples import (
    BORN_UNIX_NS,
    DURATION,
    FAILURES,
    LAYER_NORM,
    LOSS,
    STEPS,
    duration,
    family,
    snapshot,
    steps,
)
from tests.exporters.otlp.translation import attributes_of, stored
from tests.subtests import each

TAKEN = 1_800_000_000 * 10**9
TIMES = Times(TAKEN, {"llama": BORN_UNIX_NS}, {})


def requests(shown: Snapshot, times: Times = TIMES) -> list[ExportMetricsServiceRequest]:
    return [encode_metrics(batch) for batch in batches(shown, times, Resource({"a": "b"}))]


def only_metric(shown: Snapshot, times: Times = TIMES):
    (request,) = requests(shown, times)
    (metric,) = request.resource_metrics[0].scope_metrics[0].metrics
    return metric


def test_a_counter_is_a_cumulative_monotonic_sum_since_the_runs_birth():
    metric = only_metric(steps(7.0))

    assert metric.sum.is_monotonic and metric.sum.aggregation_temporality == 2
    (point,) = metric.sum.data_points
    assert (point.start_time_unix_nano, point.time_unix_nano) == (BORN_UNIX_NS, TAKEN)
    assert point.as_double == 7.0
    assert (metric.name, metric.unit, metric.description) == (STEPS.name, STEPS.unit, STEPS.help)


def test_a_counter_that_was_reset_says_since_when():
    times = Times(TAKEN, {"llama": BORN_UNIX_NS}, {(STEPS.name, ("llama",)): TAKEN - 5})
    assert only_metric(steps(7.0), times).sum.data_points[0].start_time_unix_nano == TAKEN - 5


def test_what_the_node_agent_counts_of_its_own_work_starts_with_its_process():
    shown = snapshot(family(FAILURES, (("llama", "0", "otlp"), 2.0)))
    for process, start in ((TAKEN - 5, TAKEN - 5), (BORN_UNIX_NS - 5, BORN_UNIX_NS)):
        times = Times(TAKEN, {"llama": BORN_UNIX_NS}, {}, process)
        assert only_metric(shown, times).sum.data_points[0].start_time_unix_nano == start
        steps_point = only_metric(steps(7.0), times).sum.data_points[0]
        assert steps_point.start_time_unix_nano == BORN_UNIX_NS


@pytest.mark.parametrize("born", [{"llama": TAKEN + 1}, {}])
def test_no_series_starts_after_its_own_time(born):
    point = only_metric(steps(7.0), Times(TAKEN, born, {})).sum.data_points[0]
    assert point.start_time_unix_nano == TAKEN


def test_a_histogram_keeps_bounds_counts_and_sum():
    metric = only_metric(snapshot(family(DURATION, (("llama",), duration(2, 0, 5, total=1.25)))))

    assert metric.histogram.aggregation_temporality == 2
    (point,) = metric.histogram.data_points
    assert tuple(point.explicit_bounds) == DURATION.bounds
    assert list(point.bucket_counts) == [2, 0, 5] + [0] * (len(DURATION.bounds) - 2)
    assert (point.count, point.sum, point.start_time_unix_nano) == (7, 1.25, BORN_UNIX_NS)
    assert not point.HasField("min") and not point.HasField("max")


@each("value", [0.0, -0.0, 5e-324, 1.7976931348623157e308, 2.0**53, 1 / 3])
def test_values_are_sent_bit_for_bit(value):
    metric = only_metric(snapshot(family(LOSS, (("llama",), value))))
    assert repr(metric.gauge.data_points[0].as_double) == repr(value)


def test_an_empty_label_is_absent_and_one_that_is_no_utf8_is_repaired():
    shown = snapshot(family(LAYER_NORM, (("llama", ""), 1.0), (("llama", "a\udcff.层"), 2.0)))
    first, second = only_metric(shown).gauge.data_points

    assert attributes_of(first) == {"run": "llama"}
    assert attributes_of(second) == {"run": "llama", "layer": "a?.层"}


def test_a_family_without_series_and_an_empty_snapshot_are_not_mentioned():
    assert requests(Snapshot()) == []
    assert requests(snapshot(family(LOSS))) == []


def many_layers(count: int, name: str = "model.layers.{}.weight") -> Snapshot:
    samples = [Sample(("llama", name.format(index)), float(index)) for index in range(count)]
    return snapshot(Family(LAYER_NORM, tuple(samples)), *steps(3.0).families)


@pytest.mark.parametrize(
    ("points", "characters", "count"),
    [(4000, 10**6, 5000), (1, 10**6, 3), (10, 10**6, 10), (10, 1, 7), (10**6, 3000, 500)],
)
def test_batches_hold_each_series_once_and_are_of_bearable_size(
    points, characters, count, monkeypatch
):
    monkeypatch.setattr(events, "POINTS_MAX", points)
    monkeypatch.setattr(events, "LABEL_CHARACTERS_MAX", characters)
    shown = many_layers(count)
    sent = requests(shown)
    sizes = [
        sum(
            len(m.gauge.data_points) + len(m.sum.data_points)
            for m in request.resource_metrics[0].scope_metrics[0].metrics
        )
        for request in sent
    ]

    assert sum(sizes) == count + 1
    assert max(sizes) <= points and min(sizes) >= 1
    assert len(stored(sent)) == count + 1


def test_no_request_exceeds_what_grpc_servers_take_by_default():
    for shown in (
        many_layers(20_000),
        many_layers(300, "x" * 10_000 + "{}"),
        many_layers(9, "层" * 9**5),
    ):
        for request in requests(shown):
            layers = len(request.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points)
            assert layers == 1 or request.ByteSize() < 4 * 2**20
