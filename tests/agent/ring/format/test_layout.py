"""The file is what the documentation of `layout` says, read here by offsets alone."""

import json
import struct
import zlib
from pathlib import Path

from mp_agent.records.steps import EndReason, Phase
from mp_agent.ring.format.device_part import HostPart
from mp_agent.ring.writer import RingWriter
from tests.agent.ring.samples import identity, layer_table, schema, step_record


def test_the_head_reads_as_documented(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "rank0.ring", identity(run="läuft"), step_capacity=8)
    ring.stamp(Phase.OTHER, name="warm up", sequence=3)
    ring.count(probe_errors=1, setting_errors=2, records_dropped=3, probe_seconds=0.5)
    ring.wait_for_export(True)
    ring.note_unsupported("second optimizer")
    data = ring.path.read_bytes()
    ring.close()
    magic, version, head_bytes, steps, layers, length, crc = struct.unpack_from("=8s5II", data)
    assert (magic, version, head_bytes, steps, layers) == (b"MPAGRING", 2, 4096, 8, 4)
    assert json.loads(data[32 : 32 + length])["run"] == "läuft"
    assert zlib.crc32(data[32 : 32 + length], zlib.crc32(data[:28])) == crc
    # The fourth state (starting, stamp, count, wait) lies in slot 0.
    number, crc = struct.unpack_from("=QI", data, 2048)
    state = data[2048 + 16 : 2048 + 16 + 168]
    assert number == 4 and zlib.crc32(state, 4) == crc
    assert struct.unpack_from("=Q", data, 2048 + 16 + 168) == (4,)
    phase, end, _, started, committed = struct.unpack_from("=IIqqq", state)
    assert (phase, end, started, committed) == (Phase.OTHER, EndReason.RUNNING, 3, 0)
    assert struct.unpack_from("=4Q", state, 32) == (0, 0, 0, 0)
    assert struct.unpack_from("=3QdII7s", state, 64) == (1, 2, 3, 0.5, 1, 7, b"warm up")
    listed = data[3072 + 504 + 16 : 3072 + 504 + 16 + 480]
    assert json.loads(listed.rstrip(b"\0")) == ["second optimizer"]


def test_a_body_reads_as_documented(tmp_path: Path) -> None:
    wanted = schema(shares=2, layers=5, columns=3)
    ring = RingWriter.create(tmp_path / "rank0.ring", identity(), step_capacity=8)
    ring.write_schema(wanted)
    ring.write_step(step_record(wanted, 4), complete=False)
    ring.write_step(step_record(wanted, 4))
    ring.write_layers(layer_table(wanted, 4))
    data = ring.path.read_bytes()
    ring.close()
    state = data[2048 : 2048 + 192][16:]
    # Writes: starting, schema, step, layers: the fourth lies in slot 0.
    assert struct.unpack_from("=4Q", state, 32)[:2] == (1, 1)
    offset, generation = struct.unpack_from("=2Q", state, 48)
    assert offset % 4096 == 0 and generation == 1
    size, generation, previous, first_step, first_layer, length, *device, crc = struct.unpack_from(
        "=6QHHI", data, offset
    )
    assert device == [0, 0]
    assert (generation, previous, first_step, first_layer) == (1, 0, 0, 0)
    assert offset + size == len(data)
    encoded = data[offset + 56 : offset + 56 + length]
    assert zlib.crc32(encoded, zlib.crc32(data[offset : offset + 52])) == crc
    assert json.loads(encoded)["layer_names"] == [f"layer{index}" for index in range(5)]
    slots = offset + 56 + -(-length // 8) * 8
    step_bytes, layer_bytes = 16 + 32 + 8 * (3 + 2 * 5) + 8, 16 + 16 + 8 * 5 * 5 + 8
    open_slots, layer_slots = slots + 8 * step_bytes, slots + 10 * step_bytes
    expected = [4, 12, 20]
    for slot in (slots + step_bytes, open_slots + step_bytes):
        assert struct.unpack_from("=Q", data, slot) == (1,)
        assert list(struct.unpack_from("=3q", data, slot + 16)) == expected
        assert struct.unpack_from("=Q", data, slot + 40) == (1,), "the first family of two"
        assert struct.unpack_from("=3d", data, slot + 48) == (4.0, 4 + 1 / 64, 4 + 2 / 64)
    table = struct.unpack_from("=qQdd", data, layer_slots + layer_bytes + 16)
    assert table == (4, 1, 4.0, 4 + 1 / 64)
    assert layer_slots + 4 * layer_bytes == len(data)


def test_the_part_of_a_device_reads_as_documented(tmp_path: Path) -> None:
    wanted = schema(shares=2, layers=5, columns=3)
    ring = RingWriter.create(tmp_path / "rank0.ring", identity(), step_capacity=8)
    ring.write_schema(wanted, device_slots=(4, 2))
    assert ring.device_part is not None
    known = HostPart(
        sequence=7,
        step=21,
        time_unix_ns=35,
        scalars={"step1": 0.5},
        places={"step0": 0},
        numbers=7,
        totals_place=1,
    )
    ring.device_part.write(6, known)
    ring.device_part.memory.steps_SW[2, :] = range(100, 100 + 3 + 8 + 6 + 2)
    ring.device_part.memory.layers_SW[1, :] = range(200, 200 + 17)
    data = ring.path.read_bytes()
    ring.close()
    offset = struct.unpack_from("=Q", data, 2048 + 16 + 48)[0]
    size, *_, length, steps, layers, crc = struct.unpack_from("=6QHHI", data, offset)
    assert (steps, layers) == (4, 2)
    encoded = data[offset + 56 : offset + 56 + length]
    assert zlib.crc32(encoded, zlib.crc32(data[offset : offset + 52])) == crc
    ordinary = 56 + -(-length // 8) * 8 + 10 * (48 + 8 * 9) + 4 * (32 + 8 * 15)
    hosts = offset + -(-ordinary // 4096) * 4096
    host_bytes = 16 + 40 + 3 * 24 + 8
    slot = hosts + 2 * host_bytes
    assert struct.unpack_from("=Q", data, slot) == (6,)
    assert struct.unpack_from("=5q", data, slot + 16) == (7, 21, 35, 7, 1)
    assert struct.unpack_from("=d", data, slot + 16 + 40 + 8) == (0.5,)
    assert struct.unpack_from("=6q", data, slot + 16 + 64) == (0, 1, 0, 0, -1, -1)
    transfers = hosts + 4 * host_bytes
    assert struct.unpack_from("=q", data, transfers + 2 * 19 * 8) == (100,)
    tables = transfers + 4 * 19 * 8
    assert struct.unpack_from("=q", data, tables + 17 * 8) == (200,)
    assert tables + 2 * 17 * 8 == len(data) == offset + size
