import pytest
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from mp_agent.exporters.otlp.events import is_sent, log_records, spans
from tests.exporters.otlp.samples import CONDITION, NOW, event
from tests.exporters.otlp.translation import attributes_of

RESOURCE = Resource({"service.name": "mp-agent"})
ATTRIBUTES = {
    "condition": "MpAgentGradientExplosion",
    "severity": "critical",
    "state": "firing",
    "run": "llama",
    "rank": "3",
    "layer": "model.layers.0",
    "step": 42,
    "since_step": 40,
    "value": 1234.5,
    "summary": CONDITION.summary,
    "remedy": CONDITION.remedy,
}


def only_log(*events):
    (resource,) = encode_logs(log_records(events, RESOURCE)).resource_logs
    (record,) = resource.scope_logs[0].log_records
    return record


def only_span(*events):
    (resource,) = encode_spans(spans(events, RESOURCE)).resource_spans
    (span,) = resource.scope_spans[0].spans
    return span


@pytest.mark.parametrize(("severity", "sent"), [("critical", True), ("warning", False)])
def test_critical_conditions_are_sent(severity, sent):
    assert is_sent(event(severity=severity)) is sent


def test_a_log_record_says_what_where_and_what_to_do():
    record = only_log(event())

    assert attributes_of(record) == ATTRIBUTES
    assert record.body.string_value == CONDITION.description
    assert (record.severity_number, record.severity_text) == (17, "CRITICAL")
    assert record.time_unix_nano == NOW * 10**9
    assert record.event_name == "mp_agent.condition"


def test_a_resolved_condition_is_no_error():
    record = only_log(event("resolved"))
    assert attributes_of(record)["state"] == "resolved"
    assert (record.severity_number, record.severity_text) == (9, "INFO")


def test_a_span_event_says_the_same():
    span = only_span(event())
    (said,) = span.events

    assert (said.name, span.name) == ("mp_agent.condition", "MpAgentGradientExplosion")
    assert attributes_of(said) == ATTRIBUTES
    assert span.start_time_unix_nano == span.end_time_unix_nano == said.time_unix_nano


def test_the_spans_of_a_run_are_one_trace():
    first, second, other = (
        only_span(event()),
        only_span(event("resolved")),
        only_span(event(run="x")),
    )
    assert first.trace_id == second.trace_id != other.trace_id
    assert first.span_id != second.span_id
    assert len(first.trace_id) == 16 and any(first.trace_id)


@pytest.mark.parametrize(
    ("changes", "absent"),
    [({"rank": ""}, "rank"), ({"layer": ""}, "layer"), ({"value": float("nan")}, "value")],
)
def test_what_nothing_names_is_left_out(changes, absent):
    assert absent not in attributes_of(only_log(event(**changes)))


def test_a_name_that_is_no_utf8_is_repaired():
    record = only_log(event(run="a\udcff", description="b\udcff"))
    assert (attributes_of(record)["run"], record.body.string_value) == ("a?", "b?")
    assert only_span(event(run="a\udcff"))
