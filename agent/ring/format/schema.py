"""A schema to JSON and back: the rows and columns that a body's records have."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from mp_agent.errors import RingError
from mp_agent.records.schema import FamilyColumns, Layer, Schema, Share
from mp_agent.ring.format.json_values import as_type, read_json
from mp_agent.ring.format.layout import FAMILIES_MAX


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
