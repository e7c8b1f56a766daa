"""Records lie where they should, few and small, whole or not at all."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mp_agent.errors import RingError
from mp_agent.flight.record.archive import read_archive
from mp_agent.flight.record.store import (
    REPORT_PAGE,
    newest_report,
    record_name,
    records_directory,
    write_record,
)
from tests.agent.flight.builders import make_log, make_node_record, make_segment, renamed

MEGABYTE = 2**20


def write(directory: Path, number: int = 0, *, records_max: int = 10, bytes_max: int = MEGABYTE):
    record = renamed(make_node_record(), record_name(1_000_000.0 + number, "request"))
    return write_record(directory, record, records_max=records_max, bytes_max=bytes_max)


def kept(directory: Path) -> list[str]:
    return sorted(path.name for path in records_directory(directory, "llama").iterdir())


def test_a_record_is_private_and_named_by_run_time_reason_and_node(tmp_path):
    path = write(tmp_path)
    assert path.relative_to(tmp_path).parts[1:] == ("19700112T134640.000Z-request", "node0.npz")
    assert path.parts[-3].startswith("llama-")
    assert [other.name for other in path.parent.iterdir()] == ["node0.npz"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0
    assert read_archive(path).run == "llama"


def test_names_sort_by_time_and_hold_what_a_file_name_may():
    names = [record_name(t, "Mp/Agent ..\n") for t in (1e9, 1e9 + 0.001, 1e9 + 1, 2e9)]
    assert names == sorted(names)
    assert names[0] == "20010909T014640.000Z-Mp-Agent"
    assert record_name(0.0, "///").endswith("-unnamed")


def test_the_oldest_go_when_there_are_too_many(tmp_path):
    for number in range(5):
        write(tmp_path, number, records_max=3)
    assert kept(tmp_path) == [record_name(1_000_000.0 + n, "request") for n in (2, 3, 4)]


def test_those_that_a_clock_ahead_has_named_are_the_oldest_once_it_is_right(tmp_path):
    for moment in (4e9, 4e9 + 1, 1_000_000.0, 1_000_001.0):
        record = renamed(make_node_record(), record_name(moment, "request"))
        path = write_record(tmp_path, record, records_max=2, bytes_max=MEGABYTE)
        (path.parent / REPORT_PAGE).write_text(str(moment))
        assert newest_report(tmp_path, "llama", REPORT_PAGE) == str(moment).encode()
    assert kept(tmp_path) == [record_name(1_000_000.0 + n, "request") for n in (0, 1)]


def test_the_oldest_go_when_they_are_too_large_together(tmp_path):
    size = write(tmp_path).stat().st_size
    for number in range(1, 5):
        write(tmp_path, number, bytes_max=int(2.5 * size))
    assert len(kept(tmp_path)) == 2


def test_other_nodes_files_are_left_alone(tmp_path):
    path = write(tmp_path)
    other = path.with_name("node1.npz")
    other.write_bytes(b"of another node")
    for number in range(1, 4):
        write(tmp_path, number, records_max=1)
    assert other.exists() and not path.exists()


def test_what_is_too_large_leaves_out_its_oldest_tables_then_its_oldest_steps(tmp_path):
    record = make_node_record(make_log(segments=(make_segment(100, tables=(10, 20, 30)),)))
    schema = record.ranks[0].segments[0].schema
    step_bytes = 8 * (len(schema.step_columns) + len(schema.columns("gradients"))) + 24
    # Room for all steps, two tables of two layers, and the layers' names.
    table_bytes = 2 * 8 * len(schema.columns("gradients"))
    room = 100 * step_bytes + 2 * table_bytes + 2 * 16 + len("weightbias")
    read = read_archive(write_record(tmp_path, renamed(record, "a"), records_max=9, bytes_max=room))
    assert [table.sequence for table in read.ranks[0].segments[0].tables] == [20, 30]
    small = room // 2
    path = write_record(tmp_path, renamed(record, "b"), records_max=9, bytes_max=small)
    read = read_archive(path)
    steps = [step.sequence for segment in read.ranks[0].segments for step in segment.steps]
    assert steps and steps == list(range(steps[0], 101)) and steps[0] > 1
    assert read.left_out == 103 - len(steps) - sum(len(s.tables) for s in read.ranks[0].segments)
    assert path.stat().st_size < small


def test_a_full_disk_leaves_nothing_behind_and_what_was_there_alone(tmp_path, monkeypatch):
    first = write(tmp_path)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 1)
    assert kept(tmp_path) == [first.parent.name]
    assert [path.name for path in first.parent.iterdir()] == ["node0.npz"]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    stale = write(tmp_path).with_name(".node0.npz.12345")
    stale.write_bytes(b"half")
    write(tmp_path, 1)
    assert stale.exists(), "it may be a file that another machine is writing"
    os.utime(stale, (0, 0))
    write(tmp_path, 2)
    assert not stale.exists()


def test_a_foreign_directory_in_a_place_that_all_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "flight").symlink_to(elsewhere)
    target = records_directory(tmp_path / "flight", "llama")
    target.parent.resolve().mkdir(exist_ok=True)
    with pytest.raises((RingError, OSError)):
        write(tmp_path / "flight")
    assert not list(elsewhere.rglob("*.npz"))


def test_a_record_without_the_bound_is_written_unchanged(tmp_path):
    record = renamed(make_node_record(), "whole")
    read = read_archive(write_record(tmp_path, record, records_max=1, bytes_max=MEGABYTE))
    assert replace(read, ranks=()).left_out == 0
