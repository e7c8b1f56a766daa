"""The head of a ring, to bytes and back: what stays the same for as long as the rank runs."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any
from zlib import crc32

from mp_agent.errors import RingError
from mp_agent.records.schema import RankIdentity
from mp_agent.records.text import as_utf8
from mp_agent.ring.format.json_values import as_type, read_json
from mp_agent.ring.format.layout import (
    CHECKSUM_BYTES,
    FORMAT_VERSION,
    HEAD,
    HEAD_BYTES,
    IDENTITY_BYTES_MAX,
    MAGIC,
)

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
