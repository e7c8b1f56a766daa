"""The ring is opened once, later if it cannot be yet, and given up if it never can be."""

from typing import Any

import pytest

from mp_agent.probe.isolation import Shield
from mp_agent.probe.ring_connection import ConnectLater, ProbeReports, RingConnection
from mp_agent.probe.step.phases import PhaseMarks


class Recorder:
    def __init__(self):
        self.writers = []

    def write_to(self, writer):
        self.writers.append(writer)


@pytest.fixture
def shield():
    return Shield(on_failure=lambda: None)


def connection_to(outcomes, shield):
    """A connection whose attempts to create a ring have these outcomes, in order."""
    attempts = iter(outcomes)

    def create():
        outcome = next(attempts)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    recorder: Any = Recorder()
    return RingConnection(create, shield, ProbeReports(), recorder, PhaseMarks()), recorder


def test_it_is_tried_again_until_there_is_a_ring_and_then_no_more(shield, writer):
    connection, recorder = connection_to([ConnectLater(), OSError(), writer], shield)
    for _ in range(5):
        shield.run("backward", connection.ensure)
    assert recorder.writers == [writer]
    assert not shield.closed


def test_without_any_prospect_of_a_ring_the_hooks_do_nothing_any_more(shield):
    connection, recorder = connection_to([None], shield)
    shield.run("backward", connection.ensure)
    assert shield.closed
    assert recorder.writers == []
