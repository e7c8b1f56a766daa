"""What a backend makes of a push is what a scrape shows, for every metric of the catalog."""

import re

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.resources import Resource
from prometheus_client.parser import text_string_to_metric_families

from mp_agent.catalog.metric import Kind, Snapshot
from mp_agent.catalog.metrics import METRICS
from mp_agent.exporters.otlp.signal_pusher import MetricSource
from mp_agent.exporters.prometheus import render
from tests.every import for_every
from tests.exporters.otlp.samples import batch_of, everything
from tests.exporters.otlp.translation import Series, labels, name_of, stored
from tests.subtests import each


def pushed(shown: Snapshot) -> Series:
    source = MetricSource(lambda: batch_of(shown), Resource({}))
    make = source.next_push()
    assert make is not None
    return stored(encode_metrics(request) for request in make())


def scraped(shown: Snapshot) -> Series:
    body, _ = render(shown)
    return {
        (sample.name, labels(sample.labels)): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_every_series_of_the_catalog_is_the_same_pushed_and_scraped():
    assert pushed(everything()) == scraped(everything())
    assert len(scraped(everything())) > len(METRICS)


@for_every(METRICS, lambda metric: metric.name)
def test_each_name_is_what_the_translation_makes_of_it(metric):
    translated = name_of(
        metric.name,
        metric.unit,
        monotonic=metric.kind is Kind.COUNTER,
        gauge=metric.kind in (Kind.GAUGE, Kind.INFO),
    )
    assert translated == metric.prometheus_name


@for_every(METRICS, lambda metric: metric.name)
def test_labels_and_bounds_pass_every_translation_unchanged(metric):
    for label in metric.label_names:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", label)
        assert label != "le"
    # Prometheus writes 1.0 for a scraped bound and 1 for a pushed one.
    assert not [bound for bound in metric.bounds if bound == int(bound)]


# Rows of the translation's own documentation and tests, so that the port itself is held to them.
@each(
    ("name", "unit", "monotonic", "gauge", "expected"),
    [
        ("system.filesystem.usage", "By", False, True, "system_filesystem_usage_bytes"),
        ("system.cpu.utilization", "1", False, True, "system_cpu_utilization_ratio"),
        ("http.server.requests", "1", True, False, "http_server_requests_total"),
        ("foo.total.bar", "", True, False, "foo_bar_total"),
        ("a.ratio.max", "1", False, True, "a_max_ratio"),
        ("queue.io", "By/s", False, True, "queue_io_bytes_per_second"),
        ("step.duration.seconds", "s", False, False, "step_duration_seconds"),
        ("loss_scale", "{scale}", False, True, "loss_scale"),
        ("3.layers", "", False, True, "_3_layers"),
    ],
)
def test_the_port_of_the_translation_follows_its_rules(name, unit, monotonic, gauge, expected):
    assert name_of(name, unit, monotonic=monotonic, gauge=gauge) == expected
