"""A record in the ring: its columns, and the slots it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from mp_agent.errors import RingError
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray, LayerTable, StepRecord
from mp_agent.ring.format.layout import (
    BODY,
    CHECKSUM_BYTES,
    LAYER_HEADER,
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
