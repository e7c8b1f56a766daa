"""The fixed parts of a ring and its records, to bytes and back; `layout` has the bytes."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar
from zlib import crc32

import msgspec
import numpy as np

from mp_agent.errors import RingError
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.schema import FamilyColumns, Layer, RankIdentity, Schema, Share
from mp_agent.records.steps import FloatArray, LayerTable, StepRecord
from mp_agent.records.text import as_utf8
from mp_agent.ring.format.layout import (
    BODY,
    FAMILIES_MAX,
    FORMAT_VERSION,
    HEAD,
    HEAD_BYTES,
    IDENTITY_BYTES_MAX,
    LAYER_HEADER,
    MAGIC,
    STEP_HEADER,
    BodyLayout,
    body_layout,
    device_layout,
)

_UNCHECKED_BYTES = 4
"""The CRC-32 at the end of the head's fields."""
_RANKS_MAX = 2**20
_FLOAT_BYTES = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchemaTable:
    """What `encode_schema` writes."""

    step_columns: tuple[str, ...]
    families: tuple[FamilyColumns, ...]
    shares: tuple[Share, ...]
    layer_names: tuple[str, ...]
    layer_shares: tuple[int, ...]
    layer_elements: tuple[int, ...]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Head:
    """The fixed properties of a ring."""

    step_capacity: int
    layer_capacity: int
    identity: RankIdentity


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


def encode_head(head: Head) -> bytes:
    """Return the head up to the slots. Raises RingError when the identity is too long."""
    text = json.dumps(asdict(head.identity), ensure_ascii=False)
    identity = text.encode(errors="surrogatepass")
    if len(identity) > IDENTITY_BYTES_MAX:
        raise RingError(
            f"identity of rank {head.identity.rank} takes {len(identity)} bytes; "
            f"a ring holds at most {IDENTITY_BYTES_MAX}"
        )
    capacities = (head.step_capacity, head.layer_capacity)
    fields = (MAGIC, FORMAT_VERSION, HEAD_BYTES, *capacities, len(identity))
    unchecked = HEAD.pack(*fields, 0)[:-_UNCHECKED_BYTES]
    return HEAD.pack(*fields, crc32(identity, crc32(unchecked))) + identity


def decode_head(data: bytes) -> Head:
    """Return the head; `data` is its first 2048 bytes. Raises RingError, saying what is wrong."""
    magic, version, _, step_capacity, layer_capacity, length, checksum = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise RingError("not a ring: it begins with other bytes")
    if version != FORMAT_VERSION:
        raise RingError(f"format version {version}; this release reads {FORMAT_VERSION}")
    identity = data[HEAD.size : HEAD.size + length]
    if crc32(identity, crc32(data[: HEAD.size - _UNCHECKED_BYTES])) != checksum:
        raise RingError("checksum of the head is wrong")
    fields = _read_json(identity.decode(errors="surrogatepass"))
    return Head(step_capacity, layer_capacity, _identity_of(fields))


def _identity_of(fields: object) -> RankIdentity:
    """Return the identity with names that every export can carry, and numbers that can be."""
    identity = _as_type(fields, RankIdentity)
    for name, limit in (
        ("world_size", _RANKS_MAX + 1),
        ("local_world_size", _RANKS_MAX + 1),
        ("rank", identity.world_size),
        ("local_rank", _RANKS_MAX),
        ("node_rank", _RANKS_MAX),
    ):
        if not 0 <= getattr(identity, name) < limit:
            raise RingError(f"{name} has value {getattr(identity, name)}, not 0 to {limit - 1}")
    texts: dict[str, Any] = {
        name: as_utf8(value) for name, value in asdict(identity).items() if isinstance(value, str)
    }
    return replace(identity, **texts)


def _as_type(value: object, kind: type[T]) -> T:
    """Return what JSON says as a record of a type; RingError where a field is of another one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RingError(f"{kind.__name__}: {error}") from error


def _read_json(data: str | bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RingError(f"no JSON: {error}") from error


def decode_names(payload: bytes) -> tuple[str, ...]:
    """Return the names in a slot of JSON. Raises RingError for anything else."""
    return _as_type(_read_json(payload.rstrip(b"\0")), tuple[str, ...])


def encode_schema(schema: Schema) -> bytes:
    """Return the schema as JSON, layers by column: there may be a hundred thousand.

    Raises RingError when it has more families than a record can name.
    """
    if len(schema.families) > FAMILIES_MAX:
        raise RingError(f"{len(schema.families)} families; a ring holds at most {FAMILIES_MAX}")
    table: dict[str, Any] = {
        "step_columns": schema.step_columns,
        "families": [(family.name, family.columns) for family in schema.families],
        "shares": [asdict(share) for share in schema.shares],
        "layer_names": [layer.name for layer in schema.layers],
        "layer_shares": [layer.share for layer in schema.layers],
        "layer_elements": [layer.elements for layer in schema.layers],
        "facts": schema.facts,
    }
    return json.dumps(table).encode()


def decode_schema(data: bytes) -> Schema:
    """Return the schema that `encode_schema` wrote; all ranks' equal layer names are one object."""
    table = _as_type(_read_json(data), _SchemaTable)
    layers = zip(table.layer_names, table.layer_shares, table.layer_elements, strict=True)
    return Schema(
        step_columns=table.step_columns,
        families=table.families,
        shares=table.shares,
        layers=tuple(
            Layer(name=sys.intern(name), share=share, elements=elements)
            for name, share, elements in layers
        ),
        facts=table.facts,
    )


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
    unchecked = BODY.pack(*fields, 0)[:-_UNCHECKED_BYTES]
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
    if crc32(encoded, crc32(data[: BODY.size - _UNCHECKED_BYTES])) != checksum:
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
