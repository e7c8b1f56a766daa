"""The head of a ring and the schema in it."""

import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from mp_agent.errors import RingError
from mp_agent.inputs.files import as_utf8
from mp_agent.records.schema import FamilyColumns, Layer, RankIdentity, Schema, Share
from mp_agent.ring.format.layout import (
    CHECKSUM_BYTES,
    FAMILIES_MAX,
    FORMAT_VERSION,
    HEAD,
    HEAD_BYTES,
    IDENTITY_BYTES_MAX,
    MAGIC,
)

T = TypeVar("T")


def as_type(value: object, kind: type[T]) -> T:
    """Return what JSON says as a record of a type; RingError where a field is of another one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RingError(f"{kind.__name__}: {error}") from error


def read_json(data: str | bytes) -> Any:
    """Return what JSON says. Raises RingError where it is none, or nested too deeply."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RingError(f"no JSON: {error}") from error


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
    table = as_type(read_json(data), _SchemaTable)
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


def decode_names(payload: bytes) -> tuple[str, ...]:
    """Return the names in a slot of JSON. Raises RingError for anything else."""
    return as_type(read_json(payload.rstrip(b"\0")), tuple[str, ...])


_RANKS_MAX = 2**20


@dataclass(frozen=True, slots=True)
class Head:
    """The fixed properties of a ring."""

    step_capacity: int
    layer_capacity: int
    identity: RankIdentity


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
    unchecked = HEAD.pack(*fields, 0)[:-CHECKSUM_BYTES]
    return HEAD.pack(*fields, crc32(identity, crc32(unchecked))) + identity


def decode_head(data: bytes) -> Head:
    """Return the head; `data` is its first 2048 bytes. Raises RingError, saying what is wrong."""
    magic, version, _, step_capacity, layer_capacity, length, checksum = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise RingError("not a ring: it begins with other bytes")
    if version != FORMAT_VERSION:
        raise RingError(f"format version {version}; this release reads {FORMAT_VERSION}")
    identity = data[HEAD.size : HEAD.size + length]
    if crc32(identity, crc32(data[: HEAD.size - CHECKSUM_BYTES])) != checksum:
        raise RingError("checksum of the head is wrong")
    fields = read_json(identity.decode(errors="surrogatepass"))
    return Head(step_capacity, layer_capacity, _identity_of(fields))


def _identity_of(fields: object) -> RankIdentity:
    """Return the identity with names that every export can carry, and numbers that can be."""
    identity = as_type(fields, RankIdentity)
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
