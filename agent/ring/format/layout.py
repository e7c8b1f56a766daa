"""The ring file, byte for byte (format version 2).

One file per rank, in shared memory. The rank writes it through a mapping and never waits; the node
agent reads it. Numbers are in the machine's own byte order (a ring never leaves its machine), all
offsets are multiples of 8, and what no field covers is zero. The file never shrinks::

    head (4096 bytes) │ body 1 │ body 2 …      each body begins at a multiple of the page size

Head, written before the file gets its name::

    0     8s    magic "MPAGRING"
    8     u32   format version
    12    u32   bytes of the head (4096)
    16    u32   step slots of each body
    20    u32   layer slots of each body
    24    u32   bytes of the identity
    28    u32   CRC-32 of bytes 0 to 27, continued over the identity
    32    JSON  the RankIdentity, at most 2016 bytes
    2048        2 slots: the live state (`LiveState`)
    3072        2 slots: features that cannot be measured, JSON list padded with zeros
    4088  u32   "EXIT" in the machine's order once the exit status will be recorded, else 0
    4092  i32   exit status, as the C library has it; 0x7FFFFFFF until the process exits

Body, begun when the parameters are known and again when the shape of records changes; a later body
has the next generation, and the live state points to the newest. Once bodies take `BYTES_KEPT` in
all, a new one is written over the oldest, in its region of the file::

    0     u64   bytes of the body
    8     u64   generation, from 1
    16    u64   offset of the body before, or 0
    24    u64   step records written before this body
    32    u64   layer tables written before this body
    40    u64   bytes of the schema
    48    u16   slots of steps that a device writes, or 0
    50    u16   slots of layers that a device writes
    52    u32   CRC-32 of bytes 0 to 51, continued over the schema
    56    JSON  the Schema, padded with zeros to a multiple of 8
          ...   step slots: complete records
          ...   2 slots: the record of the step under way
          ...   layer slots
          ...   the device's part, from a multiple of 4096 on, where there is one

The device's part (see `device_part`): slots of what the host knows of steps; then transfers of
steps, int64[W] each, and transfers of layers, int64[L C + 2] each, for the C columns of gradients.
A transfer (see `transfers`) is a number, the bits of float64, and a checksum; W leaves room for
S + 8 + G C numbers. A step's transfer has the number of the host's slot of that step, a layer
table's the sequence number; number n is in slot n modulo the slot count.

Slot: everything that changes is written into slots, so that one rule makes all of it safe::

    0     u64   number of this write, from 1; write n goes into slot n modulo the slot count
    8     u32   CRC-32 of the payload, begun with the number's low 32 bits
    12    u32   0
    16          payload
    16+n  u64   the number again

A reader accepts a slot only when both numbers and the CRC agree, in whatever order the processor
made the bytes visible: a torn record is never accepted, and a writer killed in the middle of a
write leaves the slots before it. The state that counts a record is written after the record.

Payload of a step slot: i64 sequence, i64 step, i64 Unix nanoseconds, u64 families, f64[S] step
columns, then of each family of the schema f64[G, C], one row per share. Payload of a layer slot:
i64 sequence, u64 families, then of each family f64[L, C]. Bit k of `families` is set where family k
was measured; the numbers of others are to be ignored. NaN stands for "not observed". Payload of a
state slot: see `STATE`.

The rank holds a POSIX record lock on the whole file while it lives.
"""

import struct
from dataclasses import dataclass

from mp_agent.ring.format.slots import SlotTable

MAGIC = b"MPAGRING"
FORMAT_VERSION = 2

HEAD = struct.Struct("=8s5II")
"""Magic, version, bytes of the head, step slots, layer slots, bytes of the identity, CRC-32."""
HEAD_BYTES = 4096
IDENTITY_BYTES_MAX = 2016

BODY = struct.Struct("=6QHHI")
"""Bytes, generation, previous offset, first step, first layer, bytes of the schema, slots of steps
that a device writes, slots of layers that it writes, CRC-32."""
CHECKSUM_BYTES = 4
"""Bytes of the CRC-32 at the end of both."""

NAME_BYTES_MAX = 64
STATE = struct.Struct(f"=IIqqq7QdII{NAME_BYTES_MAX}s")
"""Phase, end reason, phase Unix nanoseconds, started sequence, committed sequence, steps written,
layers written, newest body's offset, generation, probe errors, setting errors, records dropped,
probe seconds, scrape wait, bytes of the phase name, phase name (UTF-8)."""

STEP_HEADER = struct.Struct("=3qQ")
LAYER_HEADER = struct.Struct("=qQ")
FAMILIES_MAX = 64
_FLOAT_BYTES = 8

STATE_SLOTS = SlotTable(offset=2048, payload_bytes=STATE.size, count=2)
UNSUPPORTED_SLOTS = SlotTable(offset=3072, payload_bytes=480, count=2)

EXIT_STATUS = struct.Struct("=Ii")
EXIT_OFFSET = HEAD_BYTES - EXIT_STATUS.size
EXIT_ARMED = 0x54495845
EXIT_PENDING = 0x7FFFFFFF


DEVICE_SCALARS = 8
"""Numbers that a device may bring of a step in addition to its columns."""
_DEVICE_FIXED_BYTES = 40
_TRANSFER_EXTRA_WORDS = 2
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """Where a device writes in a body; offsets count from the body's first byte.

    Shapes are slots, and words of 8 bytes in each.
    """

    hosts: SlotTable
    steps_offset: int
    steps_shape: tuple[int, int]
    layers_offset: int
    layers_shape: tuple[int, int]

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.layers_offset + 8 * self.layers_shape[0] * self.layers_shape[1]


@dataclass(frozen=True, slots=True)
class BodyLayout:
    """Where the slots of one body lie; offsets count from the body's first byte."""

    steps: SlotTable
    open_steps: SlotTable
    layers: SlotTable
    device: DeviceLayout | None = None

    @property
    def size_bytes(self) -> int:
        """The whole body, schema included."""
        return self.layers.end if self.device is None else self.device.end


def body_layout(
    *,
    schema_bytes: int,
    step_floats: int,
    layer_floats: int,
    step_capacity: int,
    layer_capacity: int,
) -> BodyLayout:
    """Lay out a body whose records hold `step_floats` and `layer_floats` numbers each."""
    step_bytes = STEP_HEADER.size + _FLOAT_BYTES * step_floats
    layer_bytes = LAYER_HEADER.size + _FLOAT_BYTES * layer_floats
    steps = SlotTable(align(BODY.size + schema_bytes, 8), step_bytes, step_capacity)
    open_steps = SlotTable(steps.end, step_bytes, 2)
    layers = SlotTable(open_steps.end, layer_bytes, layer_capacity)
    return BodyLayout(steps, open_steps, layers)


def device_layout(
    *,
    begin: int,
    step_columns: int,
    total_floats: int,
    layer_floats: int,
    step_slots: int,
    layer_slots: int,
) -> DeviceLayout:
    """Lay out the part that a device writes to, from `begin` or the next page on."""
    host_bytes = _DEVICE_FIXED_BYTES + 3 * _FLOAT_BYTES * step_columns
    hosts = SlotTable(align(begin, _PAGE_BYTES), host_bytes, step_slots)
    words = step_columns + DEVICE_SCALARS + total_floats + _TRANSFER_EXTRA_WORDS
    return DeviceLayout(
        hosts=hosts,
        steps_offset=hosts.end,
        steps_shape=(step_slots, words),
        layers_offset=hosts.end + 8 * step_slots * words,
        layers_shape=(layer_slots, layer_floats + _TRANSFER_EXTRA_WORDS),
    )


def align(offset: int, multiple: int) -> int:
    """Return `offset`, rounded up to a multiple."""
    return -(-offset // multiple) * multiple
