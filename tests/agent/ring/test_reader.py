"""What a reader gets: history, losses, new schemas, the step under way; and what it refuses."""

import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mp_agent.errors import RingError
from mp_agent.records.schema import FamilyColumns, Layer, Schema
from mp_agent.records.steps import Phase
from mp_agent.ring.format.layout import UNSUPPORTED_SLOTS
from mp_agent.ring.format.schema import decode_schema, encode_schema
from mp_agent.ring.format.slots import SlotWriter
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from tests.agent.ring.samples import (
    identity,
    layer_table,
    same_layers,
    same_step,
    step_record,
)
from tests.agent.ring.samples import schema as sample_schema


@pytest.fixture
def reader(writer: RingWriter) -> RingReader:
    """A reader of the writer's ring that knows the schema."""
    reader = RingReader.open(writer.path)
    assert reader.schema is not None
    return reader


def sequences(reader: RingReader, after: int) -> list[int]:
    return [record.sequence for record in reader.steps_after(after)[0]]


def test_records_come_in_order_and_once(
    writer: RingWriter, reader: RingReader, schema: Schema
) -> None:
    for sequence in (1, 2, 3):
        writer.write_step(step_record(schema, sequence))
    records, lost = reader.steps_after(1)
    assert lost == 0
    assert [record.sequence for record in records] == [2, 3]
    assert all(same_step(record, step_record(schema, record.sequence)) for record in records)
    assert reader.steps_after(3) == ([], 0)


def test_at_least_1024_steps_are_kept(path: Path, schema: Schema) -> None:
    writer = RingWriter.create(path, identity())
    writer.write_schema(schema)
    for sequence in range(1, 1501):
        writer.write_step(step_record(schema, sequence))
    reader = RingReader.open(path)
    assert reader.schema == schema
    records, lost = reader.steps_after(0)
    assert [record.sequence for record in records] == list(range(1500 - 1024 + 1, 1501))
    assert lost == 1500 - 1024
    writer.close()


@pytest.mark.parametrize(("known", "lost"), [(0, 12), (5, 7), (11, 1), (12, 0), (15, 0)])
def test_what_was_overwritten_before_it_was_read_is_counted(
    writer: RingWriter, reader: RingReader, schema: Schema, known: int, lost: int
) -> None:
    for sequence in range(1, 21):
        writer.write_step(step_record(schema, sequence))
    assert reader.steps_after(known)[1] == lost
    assert sequences(reader, known) == list(range(max(known, 12) + 1, 21))


def test_sequence_numbers_that_were_never_written_are_not_lost(
    writer: RingWriter, reader: RingReader, schema: Schema
) -> None:
    for sequence in (3, 9, 40):
        writer.write_step(step_record(schema, sequence))
    assert reader.steps_after(0)[1] == 0
    assert sequences(reader, 3) == [9, 40]


def test_a_record_that_is_written_twice_is_returned_once(
    writer: RingWriter, reader: RingReader, schema: Schema
) -> None:
    first, second = step_record(schema, 2), replace(step_record(schema, 2), step=99)
    for record in (step_record(schema, 1), first, second):
        writer.write_step(record)
    records, lost = reader.steps_after(0)
    assert [(record.sequence, record.step) for record in records] == [(1, 3), (2, 99)]
    assert lost == 0
    assert reader.steps_after(2) == ([], 0)


def test_a_damaged_record_is_lost_and_hides_no_other(
    writer: RingWriter, reader: RingReader, schema: Schema
) -> None:
    for sequence in (1, 2, 3):
        writer.write_step(step_record(schema, sequence))
    data = writer.path.read_bytes()
    at = data.index(step_record(schema, 2).gradients.tobytes())
    with writer.path.open("r+b") as file:
        file.seek(at)
        file.write(b"damaged")
    records, lost = reader.steps_after(0)
    assert [record.sequence for record in records] == [1, 3]
    assert lost == 1


def test_an_open_record_is_returned_until_it_is_complete(
    writer: RingWriter, reader: RingReader, schema: Schema
) -> None:
    writer.write_step(step_record(schema, 1))
    assert reader.open_record() is None
    writer.write_step(step_record(schema, 2), complete=False)
    assert sequences(reader, 0) == [1]
    record = reader.open_record()
    assert record is not None and same_step(record, step_record(schema, 2))
    writer.write_step(step_record(schema, 2))
    assert reader.open_record() is None
    assert sequences(reader, 0) == [1, 2]


def test_the_newest_layer_tables_are_kept(
    writer: RingWriter, reader: RingReader, schema: Schema
) -> None:
    for sequence in range(10, 70, 10):
        writer.write_layers(layer_table(schema, sequence))
    tables = reader.layers_after(0)
    assert [table.sequence for table in tables] == [30, 40, 50, 60]
    assert all(same_layers(table, layer_table(schema, table.sequence)) for table in tables)
    assert [table.sequence for table in reader.layers_after(50)] == [60]


def test_a_reader_that_comes_first_sees_the_schema_appear(path: Path, schema: Schema) -> None:
    writer = RingWriter.create(path, identity())
    reader = RingReader.open(path)
    assert reader.schema is None
    assert reader.steps_after(0) == ([], 0)
    assert reader.layers_after(0) == []
    assert reader.open_record() is None
    writer.write_schema(schema)
    assert reader.schema == schema
    writer.close()


@pytest.mark.parametrize("late", [False, True])
def test_no_record_is_lost_or_misread_when_the_schema_changes(
    writer: RingWriter, reader: RingReader, schema: Schema, late: bool
) -> None:
    writer.write_step(step_record(schema, 1))
    if not late:
        assert sequences(reader, 0) == [1]
    writer.write_step(step_record(schema, 2))
    writer.write_layers(layer_table(schema, 2))
    wider, widest = sample_schema(shares=3, layers=7), sample_schema(shares=1, columns=4)
    writer.write_schema(wider)
    writer.write_step(step_record(wider, 3))
    writer.write_schema(widest)
    writer.write_step(step_record(widest, 4))
    writer.write_layers(layer_table(widest, 4))

    position = 0 if late else 1
    found: list[tuple[int, Schema]] = []
    while (current := reader.schema) and len(found) < 4:
        records, lost = reader.steps_after(position)
        assert lost == 0
        if not records:
            break
        for record in records:
            assert same_step(record, step_record(current, record.sequence))
        position = records[-1].sequence
        found += [(record.sequence, current) for record in records]
    expected = [(1, schema), (2, schema), (3, wider), (4, widest)]
    assert found == (expected if late else expected[1:])
    assert [table.sequence for table in reader.layers_after(0)] == [4]


def test_a_schema_change_without_steps_is_followed_at_once(
    writer: RingWriter, reader: RingReader
) -> None:
    wider = sample_schema(shares=3)
    writer.write_schema(wider)
    assert reader.schema == wider


def overwritten(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (0, b"ELF", "begins with other bytes"),
        (8, struct.pack("=I", 1), "format version 1; this release reads 2"),
        (16, struct.pack("=I", 9), "checksum of the head"),
        (24, struct.pack("=I", 0xFFFFFFFF), "checksum of the head"),
        (40, b"?", "checksum of the head"),
        (2048, bytes(400), "no state can be read"),
        (4096 + 56, b"?", "checksum of a schema"),
        (4096 + 40, struct.pack("=Q", 1 << 62), "truncated"),
        (4096 + 8, struct.pack("=Q", 2), "checksum of a schema"),
    ],
)
def test_a_damaged_ring_is_refused_by_name_and_reason(
    writer: RingWriter, offset: int, data: bytes, reason: str
) -> None:
    overwritten(writer.path, offset, data)
    with pytest.raises(RingError, match=reason) as refused:
        RingReader.open(writer.path)
    assert str(refused.value).count(str(writer.path)) == 1


@pytest.mark.parametrize("length", [0, 10, 2048, 4095, 4096, 4100, 5000, -1])
def test_a_truncated_ring_is_refused(writer: RingWriter, tmp_path: Path, length: int) -> None:
    copy = tmp_path / "copy.ring"
    copy.write_bytes(writer.path.read_bytes()[:length])
    with pytest.raises(RingError, match=r"copy\.ring: truncated"):
        RingReader.open(copy)


def test_a_ring_truncated_while_it_is_read_raises(writer: RingWriter, tmp_path: Path) -> None:
    copy = tmp_path / "copy.ring"
    copy.write_bytes(writer.path.read_bytes())
    reader = RingReader.open(copy)
    assert reader.schema is not None
    os.truncate(copy, 100)
    for poll in (lambda: reader.schema, lambda: reader.state, lambda: reader.steps_after(0)):
        with pytest.raises(RingError, match="truncated"):
            poll()


def test_a_ring_of_another_owner_is_refused(writer: RingWriter) -> None:
    with pytest.raises(RingError, match=f"belongs to uid {os.geteuid()}"):
        RingReader.open(writer.path, owner_uid=os.geteuid() + 1)


@pytest.mark.parametrize("kind", ["absent", "directory", "fifo", "link"])
def test_what_is_no_file_of_its_own_is_refused(
    writer: RingWriter, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "rank1.ring"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(writer.path)
    with pytest.raises(RingError, match=r"rank1\.ring: "):
        RingReader.open(path)


def test_nothing_is_left_open_when_a_ring_is_refused(writer: RingWriter) -> None:
    overwritten(writer.path, 8, b"\1")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(RingError):
            RingReader.open(writer.path)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "0"},
        {"rank": -1},
        {"rank": 4},
        {"world_size": None},
        {"world_size": 2**40},
        {"local_world_size": 2**62},
        {"host": ["host"]},
        {"created_unix_ns": [1]},
    ],
)
def test_an_identity_that_cannot_be_is_refused_by_name(path: Path, wrong: dict[str, Any]):
    RingWriter.create(path, identity(**wrong)).close()
    with pytest.raises(RingError, match=next(iter(wrong))):
        RingReader.open(path)


def test_an_identity_of_deeply_nested_brackets_is_refused(path: Path, monkeypatch) -> None:
    monkeypatch.setattr("mp_agent.ring.format.schema.asdict", lambda identity: None)
    monkeypatch.setattr("mp_agent.ring.format.schema.json.dumps", lambda *_, **__: "[" * 1500)
    RingWriter.create(path, identity()).close()
    monkeypatch.undo()
    with pytest.raises(RingError, match=r"rank0\.ring"):
        RingReader.open(path)


def test_a_phase_that_this_release_does_not_know_is_refused_at_once(
    path: Path, writer: RingWriter
) -> None:
    """Not when the ring is read: the rings next to it must not be lost with it."""
    writer.stamp(200)  # type: ignore[arg-type]
    with pytest.raises(RingError, match="200"):
        RingReader.open(path)


def test_a_schema_beyond_the_largest_offset_is_a_damage(path: Path, writer: RingWriter) -> None:
    writer._state.body_offset, writer._state.generation = 2**63 - 1, 1
    writer.stamp(Phase.STARTING)
    with pytest.raises(RingError, match=r"rank0\.ring"):
        RingReader.open(path)


@pytest.mark.parametrize("names", [b"5", b"{}", b"[1]", b"[", b"\xff", b"[" * 200])
def test_unsupported_features_that_are_no_names_are_a_damage(
    path: Path, writer: RingWriter, names: bytes
) -> None:
    payload = names.ljust(UNSUPPORTED_SLOTS.payload_bytes, b"\0")
    SlotWriter(memoryview(head := bytearray(path.read_bytes())), UNSUPPORTED_SLOTS).write(
        9, payload
    )
    path.write_bytes(head)
    with pytest.raises(RingError, match=r"rank0\.ring"):
        RingReader.open(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_columns": (1,)},
        {"families": (FamilyColumns("gradients", None),)},  # type: ignore[arg-type]
        {"shares": ({"group": 1},)},
        {"facts": ((["strategy"], "ddp"),)},
        {"layers": (Layer(name="x", share=0, elements="1"),)},  # type: ignore[arg-type]
    ],
)
def test_a_schema_of_wrong_types_is_a_damage(
    path: Path, schema: Schema, wrong: dict[str, object], monkeypatch
) -> None:
    monkeypatch.setattr("mp_agent.ring.format.schema.asdict", lambda share: share)
    text = encode_schema(replace(schema, **{"shares": (), "layers": (), **wrong}))  # type: ignore[arg-type]
    with pytest.raises(RingError):
        decode_schema(text)
