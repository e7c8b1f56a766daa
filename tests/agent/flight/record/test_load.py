"""A path is read as what it is, or refused by name."""

import shutil
from dataclasses import replace

import pytest

from mp_agent.errors import FlightError
from mp_agent.flight.record.evidence import load, one_attempt
from mp_agent.flight.record.store import record_name, write_record
from mp_agent.records.steps import EndReason
from tests.agent.flight.builders import make_log, make_node_record, make_segment, renamed


def put(directory, *logs, moment=1e6, node_rank=0):
    record = renamed(make_node_record(*logs), record_name(moment, "request"))
    record = replace(record, node_rank=node_rank, written_unix_seconds=moment)
    return write_record(directory, record, records_max=9, bytes_max=2**20)


def log(rank=0, *, world_size=2, first=1, steps=5, **kwargs):
    segments = (make_segment(steps, first=first, tables=(first,)),)
    return make_log(rank, segments=segments, world_size=world_size, **kwargs)


def sequences(known):
    return [step.sequence for segment in known.segments for step in segment.steps]


def test_a_file_a_record_and_all_records_of_a_run_are_read(tmp_path):
    path = put(tmp_path, log())
    for place in (path, path.parent, path.parent.parent):
        assert [sequences(known) for known in load(place).ranks] == [[1, 2, 3, 4, 5]]


def test_nodes_of_a_record_are_put_together(tmp_path):
    path = put(tmp_path, log(0))
    put(tmp_path, log(1, node_rank=1), node_rank=1)
    assert [known.identity.rank for known in load(path.parent).ranks] == [0, 1]


def test_records_of_the_same_attempt_add_up_and_the_later_one_says_how_it_ended(tmp_path):
    put(tmp_path, log(end=EndReason.RUNNING))
    path = put(tmp_path, log(first=4, steps=6, end=EndReason.KILLED), moment=2e6)
    evidence = load(path.parent.parent)
    assert sequences(evidence.ranks[0]) == list(range(1, 10))
    assert evidence.ranks[0].end is EndReason.KILLED
    tables = [table.sequence for s in evidence.ranks[0].segments for table in s.tables]
    assert tables == [1, 4]


def test_an_earlier_attempt_is_left_out(tmp_path):
    put(tmp_path, log(0), log(1))
    later = log(0, first=50, created_unix_ns=10**15, attempt=1)
    path = put(tmp_path, later, moment=2e6)
    assert [sequences(known) for known in load(path.parent.parent).ranks] == [[50, 51, 52, 53, 54]]


def test_ranks_that_only_the_attempt_before_a_quick_restart_has_are_left_out():
    old = [log(rank, created_unix_ns=0) for rank in range(2)]
    new = log(0, created_unix_ns=5 * 10**9, attempt=1)
    assert one_attempt([*old, new]) == (new,)


def test_ranks_of_one_attempt_are_told_apart_from_those_of_an_equal_number():
    old = log(1, created_unix_ns=0)
    new = log(0, created_unix_ns=3600 * 10**9)
    assert one_attempt([old, new]) == (new,)
    assert len(one_attempt([log(1, created_unix_ns=0), log(0, created_unix_ns=5 * 10**9)])) == 2


def test_of_several_files_a_damaged_one_is_noted(tmp_path):
    path = put(tmp_path, log(0))
    broken = path.with_name("node1.npz")
    broken.write_bytes(b"PK")
    evidence = load(path.parent)
    assert len(evidence.ranks) == 1
    assert evidence.notes[0].startswith(f"{broken}: ")


def test_what_is_of_another_run_or_attempt_in_the_same_record_is_noted(tmp_path):
    path = put(tmp_path, log(0, created_unix_ns=10**15))
    put(tmp_path, log(1, node_rank=1), node_rank=1)
    (note,) = load(path.parent).notes
    assert note == "the record of node 1, written on host, is of another attempt, and left out"
    other = renamed(make_node_record(log(1, run="other")), path.parent.name)
    other = replace(other, run="other", node_rank=2)
    written = write_record(tmp_path, other, records_max=9, bytes_max=2**20)
    shutil.copy(written, path.with_name("node1.npz"))
    (note,) = load(path.parent).notes
    assert "of node 2" in note and "is of another run, other, and left out" in note


@pytest.mark.parametrize(
    ("prepare", "problem"),
    [
        (lambda place: None, "no such file or directory"),
        (lambda place: place.mkdir(), "holds no flight record and no ring"),
        (lambda place: place.write_bytes(b""), "not a flight record, or truncated"),
        (lambda place: place.write_bytes(b"x" * 999), "not a flight record, or truncated"),
    ],
)
def test_what_is_no_record_is_refused_by_name(tmp_path, prepare, problem):
    place = tmp_path / "place"
    prepare(place)
    with pytest.raises(FlightError, match=f"{place}: {problem}"):
        load(place)


def test_of_all_runs_the_only_one_needs_no_name_and_several_are_named(tmp_path):
    record = put(tmp_path, log()).parent
    assert [each.identity for each in load(tmp_path).ranks] == [
        each.identity for each in load(record).ranks
    ]
    shutil.copytree(record.parent, tmp_path / "another")
    with pytest.raises(FlightError, match=f"name one of them: another, {record.parent.name}"):
        load(tmp_path)


def test_a_record_of_nothing_is_refused(tmp_path):
    path = put(tmp_path, log())
    record = replace(make_node_record(), ranks=(), request=make_node_record().request)
    empty = write_record(tmp_path, renamed(record, "empty"), records_max=9, bytes_max=2**20)
    with pytest.raises(FlightError, match="holds no rank"):
        load(empty)
    assert path.exists()
