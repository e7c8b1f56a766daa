"""What the exporter writes is read back by the parsers of the Prometheus client library."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from mp_agent.catalog.metric import Family, HistogramValue, Kind, Sample, Snapshot
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME, METRICS
from mp_agent.exporters.prometheus import render
from tests.subtests import each

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;version=0.0.4;q=0.5"
NASTY_NAMES = [
    'quote"d',
    "line\nbreak",
    "back\\slash",
    "trailing\\",
    "ünïcödé.层.🔥",
    '{brace="x"} 1',
    "x" * 10_000,
    "",
    " ",
    "tab\tand\rreturn",
]


def snapshot(name: str, *samples: tuple[tuple[str, ...], float | HistogramValue]) -> Snapshot:
    metric = BY_PROMETHEUS_NAME[name]
    return Snapshot((Family(metric, tuple(Sample(*sample) for sample in samples)),))


def everything() -> Snapshot:
    """One series of every family in the catalog."""
    families = []
    for metric in METRICS:
        value: float | HistogramValue = 1.0
        if metric.kind is Kind.HISTOGRAM:
            counts = tuple(range(len(metric.bounds) + 1))
            value = HistogramValue((*metric.bounds, float("inf")), counts, 2.5)
        labels = tuple(f"a {name}" for name in metric.label_names)
        families.append(Family(metric, (Sample(labels, value),)))
    return Snapshot(tuple(families))


def text(shown: Snapshot) -> str:
    body, _ = render(shown)
    return body.decode()


def openmetrics(shown: Snapshot) -> str:
    body, _ = render(shown, OPENMETRICS)
    return body.decode()


@pytest.mark.parametrize("accept", ["", "text/plain", OPENMETRICS])
def test_the_content_type_is_what_was_asked_for(accept):
    _, content_type = render(everything(), accept)

    expected = "application/openmetrics-text" if accept == OPENMETRICS else "text/plain"
    assert content_type.startswith(expected)


@pytest.mark.parametrize(("write", "parse"), [(text, parse_text), (openmetrics, parse_openmetrics)])
def test_every_metric_of_the_catalog_comes_out_by_its_name_and_labels(write, parse):
    found = {
        sample.name: sample for family in parse(write(everything())) for sample in family.samples
    }
    for metric in METRICS:
        name = metric.prometheus_name + ("_count" if metric.kind is Kind.HISTOGRAM else "")
        labels = {label: f"a {label}" for label in metric.label_names}
        assert found[name].labels == labels, name


def test_types_are_declared():
    types = {family.name: family.type for family in parse_openmetrics(openmetrics(everything()))}

    assert types["mp_agent_steps"] == "counter"
    assert types["mp_agent_run"] == "info"
    assert types["mp_agent_grad_norm"] == "gauge"
    assert types["mp_agent_step_duration_seconds"] == "histogram"
    assert "# TYPE mp_agent_run_info gauge" in text(everything())


@each("name", NASTY_NAMES)
@each(("write", "parse"), [(text, parse_text), (openmetrics, parse_openmetrics)])
def test_any_layer_name_is_valid_exposition(write, parse, name):
    shown = snapshot("mp_agent_layer_grad_norm", (("run", name), 1.5), (("run", "next"), 2.5))
    (family,) = list(parse(write(shown)))

    assert {s.labels["layer"]: s.value for s in family.samples} == {name: 1.5, "next": 2.5}


@pytest.mark.parametrize("write", [text, openmetrics])
def test_there_are_no_created_series(write):
    assert "_created" not in write(everything())


def test_a_histogram_keeps_its_buckets_count_and_sum():
    value = HistogramValue((0.5, 1.1, float("inf")), (1, 3, 4), 12.25)
    lines = text(snapshot("mp_agent_step_duration_seconds", (("r",), value))).splitlines()

    assert 'mp_agent_step_duration_seconds_bucket{le="0.5",run="r"} 1.0' in lines
    assert 'mp_agent_step_duration_seconds_bucket{le="1.1",run="r"} 3.0' in lines
    assert 'mp_agent_step_duration_seconds_bucket{le="+Inf",run="r"} 4.0' in lines
    assert 'mp_agent_step_duration_seconds_count{run="r"} 4.0' in lines
    assert 'mp_agent_step_duration_seconds_sum{run="r"} 12.25' in lines


def test_a_family_without_series_is_not_mentioned():
    assert text(snapshot("mp_agent_loss")) == ""


def test_an_empty_snapshot_is_a_valid_answer():
    assert text(Snapshot()) == ""
    assert list(parse_openmetrics(openmetrics(Snapshot()))) == []


def test_large_and_small_values_survive():
    samples = [(("a",), 1e-300), (("b",), 1.7e308), (("c",), 2.0**53)]
    (family,) = parse_text(text(snapshot("mp_agent_loss", *samples)))

    assert [s.value for s in family.samples] == [value for _, value in samples]
