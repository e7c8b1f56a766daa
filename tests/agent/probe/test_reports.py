"""What the probe reports of itself reaches the ring, whether noted before or after there is one."""

import logging

from mp_agent.probe.ring_connection import ProbeReports
from mp_agent.ring.reader import RingReader


def state_of(writer):
    reader = RingReader.open(writer.path)
    try:
        return reader.state
    finally:
        reader.close()


def test_failures_and_features_from_before_the_ring_are_in_it(writer):
    reports = ProbeReports()
    for _ in range(2):
        reports.count_failure()
    reports.note_unsupported("this")
    reports.note_rest("clipping")
    reports.write_to(writer)
    reports.count_failure()
    reports.note_capture()
    reports.note_unsupported("this")
    state = state_of(writer)
    assert state.probe_errors == 3
    assert state.unsupported == ("this", "clipping, which keeps failing", "CUDA graph capture")


def test_each_feature_is_logged_once(writer, caplog):
    reports = ProbeReports()
    with caplog.at_level(logging.WARNING, "mp_agent"):
        for _ in range(2):
            reports.note_unsupported("this")
        reports.write_to(writer)
        reports.note_unsupported("this")
    assert [record.getMessage() for record in caplog.records] == [
        "mp_agent does not measure this: this; the rest of it goes on"
    ]


def test_updates_without_the_guard_are_not_said_to_be_unmeasured(writer, caplog):
    reports = ProbeReports()
    reports.write_to(writer)
    with caplog.at_level(logging.WARNING, "mp_agent"):
        for _ in range(2):
            reports.note_unguarded("the guard of an engine that steps by itself")
    assert [record.getMessage() for record in caplog.records] == [
        "the guard of an engine that steps by itself is off: these updates are made as without a "
        "guard"
    ]
    assert state_of(writer).unsupported == ("the guard of an engine that steps by itself",)


def test_what_a_failed_device_leaves_unmeasured_is_not_laid_to_the_script(writer):
    reports = ProbeReports()
    reports.write_to(writer)
    reports.note_unsupported("this")
    reports.note_device_error()
    reports.note_unsupported("that")
    assert state_of(writer).unsupported == ("this", "steps after an error of the device")
