"""Critical conditions as log records and, on request, as spans with an event."""

import hashlib
import random
from collections.abc import Iterable, Mapping
from math import isfinite

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from mp_agent.exporters.otlp.conversion.metrics_data import SCOPE, unix_ns
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.text import as_utf8

EVENT_NAME = "mp_agent.condition"

_SEVERITIES = {"firing": SeverityNumber.ERROR, "resolved": SeverityNumber.INFO}


def is_sent(event: StoredConditionEvent) -> bool:
    """Return whether an event is sent: only critical ones are."""
    return event.condition.severity == "critical"


def log_records(
    events: Iterable[StoredConditionEvent], resource: Resource
) -> list[ReadableLogRecord]:
    """Return one log record per event."""
    return [ReadableLogRecord(_log_record(event), resource, SCOPE) for event in events]


def spans(events: Iterable[StoredConditionEvent], resource: Resource) -> list[ReadableSpan]:
    """Return one span of zero duration per event; those of a run form one trace."""
    return [_span(event, resource) for event in events]


def _log_record(event: StoredConditionEvent) -> LogRecord:
    return LogRecord(
        timestamp=unix_ns(event.time_unix_seconds),
        severity_number=_SEVERITIES.get(event.state, SeverityNumber.ERROR),
        severity_text=event.condition.severity.upper() if event.state == "firing" else "INFO",
        body=as_utf8(event.condition.description or event.condition.summary),
        attributes=dict(_attributes(event)),
        event_name=EVENT_NAME,
    )


def _span(event: StoredConditionEvent, resource: Resource) -> ReadableSpan:
    moment = unix_ns(event.time_unix_seconds)
    digest = hashlib.sha256(f"mp_agent {event.condition.run}".encode(errors="replace")).digest()
    attributes = _attributes(event)
    return ReadableSpan(
        name=event.condition.name,
        context=SpanContext(
            trace_id=int.from_bytes(digest[:16], "big"),
            span_id=random.SystemRandom().getrandbits(63) | 1,
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        ),
        resource=resource,
        attributes={"run": as_utf8(event.condition.run)},
        events=[Event(EVENT_NAME, attributes=attributes, timestamp=moment)],
        start_time=moment,
        end_time=moment,
        instrumentation_scope=SCOPE,
    )


def _attributes(event: StoredConditionEvent) -> Mapping[str, str | int | float]:
    """Return what is known, under the names of the metrics' labels."""
    condition = event.condition
    known: dict[str, str | int | float] = {
        "condition": condition.name,
        "severity": condition.severity,
        "state": event.state,
        "run": condition.run,
        "rank": condition.rank,
        "layer": condition.layer,
        "phase": condition.phase,
        "step": event.step,
        "since_step": condition.since_step,
        "value": condition.value,
        "summary": condition.summary,
        "remedy": condition.remedy,
    }
    return {
        name: as_utf8(value) if isinstance(value, str) else value
        for name, value in known.items()
        if value != "" and not (isinstance(value, float) and not isfinite(value))
    }
