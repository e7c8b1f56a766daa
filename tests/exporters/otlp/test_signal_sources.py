"""What is queued for the next push."""

import time

from opentelemetry.sdk.resources import Resource

from mp_agent.exporters.otlp.client import ExportError
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
    assert source.lost == 501


def test_events_in_a_push_that_a_full_queue_drops_are_lost_unless_the_push_arrives():
    source = EventSource(lambda events, resource: list(events), Resource({}))
    lost = []
    for error in (None, ExportError("busy")):
        for number in range(1000):
            source.add(event(at=time.time(), layer=str(number)))
        assert source.next_push() is not None
        source.add(event(at=time.time()))
        source.settle(error)
        lost.append(source.lost)
    # The event that came in during the first push is the first one of the second.
    assert lost == [0, 2]
