"""The header of a body, to bytes and back: where its slots are, and its schema."""

from dataclasses import dataclass, replace
from zlib import crc32

from mp_agent.errors import RingError
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.schema import Schema
from mp_agent.ring.format.head import Head
from mp_agent.ring.format.layout import (
    BODY,
    CHECKSUM_BYTES,
    BodyLayout,
    body_layout,
    device_layout,
)
from mp_agent.ring.format.schema import decode_schema


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
