"""The ring is opened once, later if it cannot be yet, and given up if it never can be."""

from typing import Any

import pytest

from mp_agent.probe.isolation import Guard
from mp_agent.probe.ring_connection import ConnectLater, ProbeReports, RingConnection
from mp_agent.probe.step.phases import PhaseMarks


class Recorder:
    def __init__(self):
        self.writers = []

    def write_to(self, writer):
        self.writers.append(writer)


@pytest.fixture
def guard():
    return Guard(on_failure=lambda: None)


def connection_to(outcomes, guard):
    """A connection whose attempts to create a ring have these outcomes, in order."""
    attempts = iter(outcomes)

    def create():
        outcome = next(attempts)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    recorder: Any = Recorder()
    return RingConnection(create, guard, ProbeReports(), recorder, PhaseMarks()), recorder


def test_it_is_tried_again_until_there_is_a_ring_and_then_no_more(guard, writer):
    connection, recorder = connection_to([ConnectLater(), OSError(), writer], guard)
    for _ in range(5):
        guard.run("backward", connection.ensure)
    assert recorder.writers == [writer]
    assert not guard.closed


def test_without_any_prospect_of_a_ring_the_hooks_do_nothing_any_more(guard):
    connection, recorder = connection_to([None], guard)
    guard.run("backward", connection.ensure)
    assert guard.closed
    assert recorder.writers == []
