"""What is queued for the next push."""

import time

from opentelemetry.sdk.resources import Resource

from mp_agent.exporters.otlp.signal_pusher import EventSource
from tests.exporters.otlp.samples import event


def test_events_are_kept_for_an_hour_and_at_most_a_thousand():
    source = EventSource(lambda events, resource: list(events), Resource({}))
    source.add(event(at=time.time() - 3700))
    for number in range(1500):
        source.add(event(at=time.time(), layer=str(number)))
    make = source.next_push()
    assert make is not None
    ((*kept,),) = make()
    assert len(kept) == 1000 and kept[-1].condition.layer == "1499"
