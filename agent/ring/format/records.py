"""What a rank writes into its ring, as bytes: records, its live state, and its exit status.

The exit status is written by the C library as the process ends: Python has no place for it. Once
`SystemExit` has left the program, no Python code sees its code.
"""

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from mp_agent.errors import RingError
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.schema import Schema
from mp_agent.records.steps import EndReason, FloatArray, LayerTable, Phase, RankState, StepRecord
from mp_agent.ring.format.layout import (
    BODY,
    CHECKSUM_BYTES,
    EXIT_ARMED,
    EXIT_OFFSET,
    EXIT_PENDING,
    EXIT_STATUS,
    HEAD_BYTES,
    LAYER_HEADER,
    NAME_BYTES_MAX,
    STATE,
    STEP_HEADER,
    BodyLayout,
    body_layout,
    device_layout,
)
from mp_agent.ring.format.schema import Head, decode_schema

_FLOAT_BYTES = 8


def encode_step(record: StepRecord, schema: Schema) -> bytes:
    """Return a step slot's payload. Raises ValueError for arrays of another shape."""
    values_S = np.asarray(record.values, dtype=np.float64)
    if values_S.shape != (len(schema.step_columns),):
        raise ValueError(f"values of step {record.sequence} have shape {values_S.shape}")
    measured, rows = _encode_families(
        record.families, schema, len(schema.shares), f"step {record.sequence}"
    )
    fixed = STEP_HEADER.pack(record.sequence, record.step, record.time_unix_ns, measured)
    return fixed + values_S.tobytes() + rows


def decode_step(payload: bytes, schema: Schema) -> StepRecord:
    """Return the record in a step slot's payload; its arrays are read-only."""
    sequence, step, time_unix_ns, measured = STEP_HEADER.unpack_from(payload)
    numbers = np.frombuffer(payload, dtype=np.float64, offset=STEP_HEADER.size)
    columns = len(schema.step_columns)
    return StepRecord(
        sequence=sequence,
        step=step,
        time_unix_ns=time_unix_ns,
        values=numbers[:columns],
        families=_decode_families(numbers[columns:], measured, schema, len(schema.shares)),
    )


def encode_layers(table: LayerTable, schema: Schema) -> bytes:
    """Return a layer slot's payload. Raises ValueError for rows of another shape."""
    measured, rows = _encode_families(
        table.families, schema, len(schema.layers), f"layers of step {table.sequence}"
    )
    return LAYER_HEADER.pack(table.sequence, measured) + rows


def decode_layers(payload: bytes, schema: Schema) -> LayerTable:
    """Return the table in a layer slot's payload; its array is read-only."""
    sequence, measured = LAYER_HEADER.unpack_from(payload)
    numbers = np.frombuffer(payload, dtype=np.float64, offset=LAYER_HEADER.size)
    families = _decode_families(numbers, measured, schema, len(schema.layers))
    return LayerTable(sequence=sequence, families=families)


def _encode_families(
    families: Mapping[str, FloatArray], schema: Schema, rows: int, what: str
) -> tuple[int, bytes]:
    """Return which families of the schema were measured, as bits, and the rows of all."""
    if unknown := families.keys() - {family.name for family in schema.families}:
        raise ValueError(f"{what}: {', '.join(sorted(unknown))} is not in the schema")
    measured, parts = 0, []
    for place, family in enumerate(schema.families):
        shape = (rows, len(family.columns))
        if family.name not in families:
            parts.append(bytes(rows * len(family.columns) * _FLOAT_BYTES))
            continue
        rows_NC = np.asarray(families[family.name], dtype=np.float64)
        if rows_NC.shape != shape:
            raise ValueError(f"{family.name} of {what} have shape {rows_NC.shape}, not {shape}")
        measured |= 1 << place
        parts.append(rows_NC.tobytes())
    return measured, parts[0] if len(parts) == 1 else b"".join(parts)


def _decode_families(
    numbers: FloatArray, measured: int, schema: Schema, rows: int
) -> dict[str, FloatArray]:
    found, start = {}, 0
    for place, family in enumerate(schema.families):
        size = rows * len(family.columns)
        if measured >> place & 1:
            found[family.name] = numbers[start : start + size].reshape(rows, len(family.columns))
        start += size
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyHeader:
    """The header of a body."""

    size_bytes: int
    generation: int
    previous_offset: int
    first_step: int
    """Step records written before this body."""
    first_layer: int
    """Layer tables written before this body."""
    schema: Schema
    layout: BodyLayout


def layout_for(
    schema: Schema, schema_bytes: int, head: Head, device_slots: tuple[int, int] = (0, 0)
) -> BodyLayout:
    """Lay out the body that holds records of `schema`.

    device_slots: of steps and of layers that a device writes; none without the former.
    """
    columns = sum(len(family.columns) for family in schema.families)
    layout = body_layout(
        schema_bytes=schema_bytes,
        step_floats=len(schema.step_columns) + len(schema.shares) * columns,
        layer_floats=len(schema.layers) * columns,
        step_capacity=head.step_capacity,
        layer_capacity=head.layer_capacity,
    )
    if not device_slots[0]:
        return layout
    gradients = len(schema.columns(GRADIENTS.name))
    device = device_layout(
        begin=layout.size_bytes,
        step_columns=len(schema.step_columns),
        total_floats=schema.parameter_shares * gradients,
        layer_floats=schema.parameter_layers * gradients,
        step_slots=device_slots[0],
        layer_slots=device_slots[1],
    )
    return replace(layout, device=device)


def encode_body_header(header: BodyHeader, schema: bytes) -> bytes:
    """Return a body up to its slots; `schema` is the encoded schema."""
    device = header.layout.device
    fields = (
        header.size_bytes,
        header.generation,
        header.previous_offset,
        header.first_step,
        header.first_layer,
        len(schema),
        0 if device is None else device.steps_shape[0],
        0 if device is None else device.layers_shape[0],
    )
    unchecked = BODY.pack(*fields, 0)[:-CHECKSUM_BYTES]
    return BODY.pack(*fields, crc32(schema, crc32(unchecked))) + schema


def schema_bytes_of(data: bytes) -> int:
    """Return how long the schema is that follows a body's fixed fields."""
    length: int = BODY.unpack_from(data)[5]
    return length


def generation_of(data: bytes) -> int:
    """Return the generation of the body that begins here; 0 where none does."""
    generation: int = BODY.unpack_from(data)[1]
    return generation


def decode_body_header(data: bytes, head: Head) -> BodyHeader:
    """Return a body's header; `data` ends with the schema. Raises RingError if it is damaged."""
    size_bytes, generation, previous, first_step, first_layer, _, *device_slots, checksum = (
        BODY.unpack_from(data)
    )
    encoded = data[BODY.size :]
    if crc32(encoded, crc32(data[: BODY.size - CHECKSUM_BYTES])) != checksum:
        raise RingError("checksum of a schema is wrong")
    schema = decode_schema(encoded)
    return BodyHeader(
        size_bytes=size_bytes,
        generation=generation,
        previous_offset=previous,
        first_step=first_step,
        first_layer=first_layer,
        schema=schema,
        layout=layout_for(schema, len(encoded), head, (device_slots[0], device_slots[1])),
    )


@dataclass(slots=True)
class LiveState:
    """Live state, changed in place and published as a whole, so that readers see one moment."""

    phase: int = Phase.STARTING
    end_reason: int = EndReason.RUNNING
    phase_unix_ns: int = 0
    started_sequence: int = 0
    committed_sequence: int = 0
    steps_written: int = 0
    layers_written: int = 0
    body_offset: int = 0
    generation: int = 0
    probe_errors: int = 0
    setting_errors: int = 0
    records_dropped: int = 0
    probe_seconds: float = 0.0
    scrape_wait: bool = False
    phase_name: bytes = b""
    """UTF-8, cut to 64 bytes; empty when the phase's own name says it."""

    def pack(self) -> bytes:
        """Return the payload of a state slot."""
        return STATE.pack(
            self.phase,
            self.end_reason,
            self.phase_unix_ns,
            self.started_sequence,
            self.committed_sequence,
            self.steps_written,
            self.layers_written,
            self.body_offset,
            self.generation,
            self.probe_errors,
            self.setting_errors,
            self.records_dropped,
            self.probe_seconds,
            self.scrape_wait,
            len(self.phase_name),
            self.phase_name,
        )

    @classmethod
    def unpack(cls, payload: bytes) -> "LiveState":
        """Return the state that `pack` wrote."""
        *numbers, scrape_wait, name_bytes, name = STATE.unpack(payload)
        fields = (*numbers, bool(scrape_wait), name[:name_bytes])
        return cls(*fields)

    def rank_state(self, unsupported: tuple[str, ...]) -> RankState:
        """Return the part that readers use."""
        phase = Phase(self.phase)
        return RankState(
            phase=phase,
            phase_name=self.phase_name.decode(errors="ignore") or phase.name.lower(),
            phase_unix_ns=self.phase_unix_ns,
            started_sequence=self.started_sequence,
            committed_sequence=self.committed_sequence,
            end_reason=EndReason(self.end_reason),
            scrape_wait=self.scrape_wait,
            probe_errors=self.probe_errors,
            setting_errors=self.setting_errors,
            records_dropped=self.records_dropped,
            probe_seconds=self.probe_seconds,
            unsupported=unsupported,
        )


def encode_name(name: str) -> bytes:
    """Return a phase's name as the state holds it."""
    return name.encode(errors="replace")[:NAME_BYTES_MAX]


_UNBUFFERED = 2
_MAP_FIXED = 0x10
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class ExitStatusRecorder:
    """Has glibc's `exit()` write its status into a ring, in this process alone.

    `on_exit` calls `putw(status, stream)`: no Python runs at that point. The stream is of memory,
    not of a descriptor: that may be another file of the program's by then. Where the C library has
    no `on_exit`, nothing is recorded.
    """

    def __init__(self) -> None:
        self._address = 0

    def arm(self, ring_fd: int) -> None:
        """Record into this ring; one that was armed before keeps what it has."""
        if not self._address:
            self._open_stream()
        self._map(mmap.MAP_SHARED, ring_fd)
        os.pwrite(ring_fd, EXIT_STATUS.pack(EXIT_ARMED, EXIT_PENDING), EXIT_OFFSET)

    def disarm(self) -> None:
        """Record into no ring: a write to one that is truncated would end the process."""
        if self._address:
            self._map(_PRIVATE)

    def _open_stream(self) -> None:
        address = self._map(_PRIVATE)
        libc = ctypes.CDLL(None)
        libc.fmemopen.restype = ctypes.c_void_p
        status = ctypes.c_void_p(address + EXIT_OFFSET + 4)
        stream = ctypes.c_void_p(libc.fmemopen(status, ctypes.c_size_t(4), b"r+"))
        libc.setvbuf(stream, None, _UNBUFFERED, 0)
        if not stream or libc.on_exit(libc.putw, stream) != 0:
            raise OSError("the exit status cannot be recorded")
        self._address = address
        # A forked child has the same exit handlers: they get memory of its own to write to.
        os.register_at_fork(after_in_child=lambda: self._map(_PRIVATE))

    def _map(self, flags: int, fd: int = -1) -> int:
        """Map the head of a ring, or memory of this process, at the address of the last one."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        address = ctypes.c_void_p(self._address)
        flags |= _MAP_FIXED if self._address else 0
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        size, offset = ctypes.c_size_t(HEAD_BYTES), ctypes.c_long(0)
        found = libc.mmap(address, size, protection, flags, fd, offset)
        if found == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "the exit status cannot be recorded")
        return int(found)


RECORDER = ExitStatusRecorder()


def decode(field: bytes) -> int | None:
    """Return the exit code that a ring holds, 0 to 255; None when there is none."""
    armed, status = EXIT_STATUS.unpack(field)
    return status & 0xFF if armed == EXIT_ARMED and status != EXIT_PENDING else None
