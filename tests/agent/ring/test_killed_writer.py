"""A writer at full speed, read all the while and killed at random: no record is ever torn.

Every number of these records follows from the sequence number, so that a mixture is noticed.
"""

import itertools
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mp_agent.records.schema import Schema
from mp_agent.records.steps import EndReason, Phase
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from tests.agent.ring.children import child, exit_code_of, kill
from tests.agent.ring.samples import (
    identity,
    layer_table,
    same_layers,
    same_step,
    schema,
    step_record,
)
from tests.waiting import wait_until

STEP_CAPACITY = 4
SCHEMA = schema(shares=60, layers=300, columns=6)


def train_forever(path: Path, step_capacity: int) -> Callable[[], None]:
    """Return the work of a rank that writes steps as fast as it can."""

    def work() -> None:
        writer = RingWriter.create(path, identity(), step_capacity=step_capacity)
        writer.write_schema(SCHEMA)
        for sequence in itertools.count(1):
            writer.stamp(Phase.OTHER, name=f"step {sequence}", sequence=sequence)
            record = step_record(SCHEMA, sequence)
            writer.write_step(record, complete=False)
            writer.write_layers(layer_table(SCHEMA, sequence))
            writer.write_step(record)

    return work


class Follower:
    """Reads a ring as the node agent does, and checks everything that it gets."""

    def __init__(self, path: Path) -> None:
        self.reader = RingReader.open(path)
        self.position = self.taken = self.lost = self.tables = 0
        wait_until(lambda: self.reader.schema == SCHEMA, what="the schema")

    def poll(self) -> None:
        records, lost = self.reader.steps_after(self.position)
        for before, record in itertools.pairwise(records):
            assert before.sequence < record.sequence
        for record in records:
            assert record.sequence > self.position
            assert same_step(record, step_record(SCHEMA, record.sequence))
            self.position = record.sequence
        self.taken += len(records)
        self.lost += lost
        for table in self.reader.layers_after(self.position):
            assert same_layers(table, layer_table(SCHEMA, table.sequence))
            self.tables += 1
        open_record = self.reader.open_record()
        if open_record is not None:
            assert same_step(open_record, step_record(SCHEMA, open_record.sequence))
        self.check_state()

    def check_state(self) -> None:
        state = self.reader.state
        assert 0 <= state.started_sequence - state.committed_sequence <= 1
        if state.phase is Phase.OTHER:
            assert state.phase_name == f"step {state.started_sequence}"


@pytest.mark.slow
@pytest.mark.parametrize("step_capacity", [STEP_CAPACITY, 1024])
def test_a_reader_of_a_writer_at_full_speed_gets_whole_records_only(
    tmp_path: Path, step_capacity: int
) -> None:
    path = tmp_path / "rank0.ring"
    with child(train_forever(path, step_capacity)):
        wait_until(path.exists, what="the ring")
        follower = Follower(path)
        deadline = time.monotonic() + 180
        while follower.taken < 2000 or follower.tables < 50:
            assert time.monotonic() < deadline, vars(follower)
            follower.poll()
    assert follower.taken + follower.lost == follower.position


def die_and_be_read(path: Path, random_seconds: float) -> bool:
    """Let a rank be killed after a time; check what it leaves; return whether a step was open."""
    with child(train_forever(path, STEP_CAPACITY)) as pid:
        wait_until(path.exists, what="the ring", interval_seconds=0.0005)
        watcher = RingReader.open(path)
        assert watcher.writer_alive()
        end = time.monotonic() + random_seconds
        while time.monotonic() < end:
            watcher.state  # noqa: B018
        kill(pid)
    assert not watcher.writer_alive()
    watcher.close()
    return was_open(RingReader.open(path))


def was_open(reader: RingReader) -> bool:
    current, state = reader.schema, reader.state
    if current is None:
        assert state.committed_sequence == 0
        return False
    check_history(reader, current, state.committed_sequence)
    record = reader.open_record()
    if record is not None:
        assert record.sequence == state.committed_sequence + 1
        assert same_step(record, step_record(current, record.sequence))
    reader.close()
    return record is not None


def check_history(reader: RingReader, current: Schema, committed: int) -> None:
    """All kept steps are there, but for the oldest: the writer may have died overwriting it."""
    records, lost = reader.steps_after(0)
    kept = min(committed, STEP_CAPACITY)
    assert kept - (committed >= STEP_CAPACITY) <= len(records) <= kept
    assert [record.sequence for record in records] == list(
        range(committed - len(records) + 1, committed + 1)
    )
    assert lost == committed - len(records)
    for record in records:
        assert same_step(record, step_record(current, record.sequence))


@pytest.mark.slow
def test_a_rank_killed_at_any_moment_leaves_a_readable_ring(tmp_path: Path) -> None:
    moments = random.Random(20)
    open_steps = sum(
        die_and_be_read(tmp_path / f"rank{death}.ring", moments.uniform(0, 0.02))
        for death in range(100)
    )
    assert 0 < open_steps < 100, "some die within a step, some between two"


def change_schema_forever(path: Path) -> None:
    writer = RingWriter.create(path, identity(), step_capacity=STEP_CAPACITY)
    for sequence in itertools.count(1):
        current = schema(shares=sequence % 5)
        writer.write_schema(current)
        writer.write_step(step_record(current, sequence))


@pytest.mark.slow
def test_a_rank_killed_while_its_schema_changes_loses_no_record(tmp_path: Path) -> None:
    moments = random.Random(21)
    for death in range(30):
        path = tmp_path / f"rank{death}.ring"
        with child(partial(change_schema_forever, path)):
            wait_until(path.exists, what="the ring", interval_seconds=0.0005)
            time.sleep(moments.uniform(0, 0.01))
        reader = RingReader.open(path)
        committed, found = reader.state.committed_sequence, 0
        while (current := reader.schema) and found < committed:
            records, lost = reader.steps_after(found)
            assert ([record.sequence for record in records], lost) == ([found + 1], 0)
            assert same_step(records[0], step_record(current, found + 1))
            found += 1
        assert found == committed
        reader.close()


def write_while_interrupted(path: Path) -> None:
    """Write steps; a signal handler stamps and flushes the same record at any point of it."""
    writer, interruptions = RingWriter.create(path, identity()), 0
    writer.write_schema(SCHEMA)
    record = step_record(SCHEMA, 1)

    def flush(*_: object) -> None:
        nonlocal interruptions
        interruptions += 1
        writer.stamp(Phase.OTHER, name=f"step {record.sequence}", sequence=record.sequence)
        writer.write_step(record)

    signal.signal(signal.SIGALRM, flush)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    for sequence in itertools.count(1):
        record = step_record(SCHEMA, sequence)
        writer.write_step(record, complete=False)
        writer.write_step(record)
        if interruptions > 100 and sequence > 500:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    writer.stamp(Phase.OTHER, name=f"step {sequence}", sequence=sequence)
    writer.end(EndReason.KILLED)


def test_a_signal_handler_that_flushes_within_a_write_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ring"
    assert exit_code_of(lambda: write_while_interrupted(path)) == 0
    reader = RingReader.open(path)
    assert reader.schema == SCHEMA
    state = reader.state
    records, lost = reader.steps_after(0)
    assert state.end_reason is EndReason.KILLED
    expected = range(state.committed_sequence - len(records) + 1, state.committed_sequence + 1)
    assert [record.sequence for record in records] == list(expected)
    assert len(records) >= 400 and lost == state.committed_sequence - len(records)
    assert all(same_step(record, step_record(SCHEMA, record.sequence)) for record in records)
    assert reader.open_record() is None
    reader.close()
