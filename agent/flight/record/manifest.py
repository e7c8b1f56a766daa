"""The manifest of a flight record's file: its ranks, schemas and arrays.

The file `node<k>.npz` is a zip archive of NumPy arrays, as `numpy.savez` writes them, with
`manifest.json` next to the arrays. A zip has a checksum of each member and its directory at the
end, so that a truncated file is detected; every language can read it, and
`unzip -p node0.npz manifest.json` shows what it is. Arrays are little-endian, float64 or int64; NaN
means "not observed".
"""

from typing import Any

import msgspec
from msgspec import Struct

from mp_agent.errors import FlightError
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.flight import FlightRequest
from mp_agent.records.schema import FamilyColumns, Layer, RankIdentity, Schema, Share
from mp_agent.records.steps import EndReason, RankState

FORMAT = "mp_agent flight record"
VERSION = 2
"""Incremented by every change that an older reader would misread."""

MANIFEST = "manifest.json"


class Names(Struct, frozen=True, kw_only=True):
    """Layers by column: there may be 100 000 of them, the same on every rank."""

    names: tuple[str, ...]
    shares: tuple[int, ...]
    elements: tuple[int, ...]


class SchemaEntry(Struct, frozen=True, kw_only=True):
    """A `Schema`; its layers are those of `Manifest.layers` at an index."""

    step_columns: tuple[str, ...]
    families: tuple[FamilyColumns, ...]
    shares: tuple[Share, ...]
    layers: int
    facts: tuple[tuple[str, str], ...]


class TableEntry(Struct, frozen=True, kw_only=True):
    """A layer table: the array of each family is [L, C], one row per layer.

    Equal arrays are stored once.
    """

    sequence: int
    families: dict[str, str]


class FamilyEntry(Struct, frozen=True, kw_only=True):
    """Rows of a family on some of a segment's steps."""

    places: str
    rows: str


class SegmentEntry(Struct, frozen=True, kw_only=True):
    """Rows of a rank under one schema.

    Arrays of N steps: sequence, step and time_unix_ns [N], values [N, S]. Of each family the places
    of the steps on which it was measured [M], and its rows [M, G, C].
    """

    schema: int
    sequence: str
    step: str
    time_unix_ns: str
    values: str
    families: dict[str, FamilyEntry]
    tables: tuple[TableEntry, ...]


class RankEntry(Struct, frozen=True, kw_only=True):
    """One rank."""

    identity: RankIdentity
    state: RankState
    end: EndReason
    segments: tuple[SegmentEntry, ...]


class Manifest(Struct, frozen=True, kw_only=True):
    """Everything in a file except its arrays, which are named by their members."""

    format: str = FORMAT
    version: int = VERSION
    request: FlightRequest
    run: str
    node_rank: int
    host: str
    written_unix_seconds: float
    versions: dict[str, str]
    settings: dict[str, Any]
    thresholds: dict[str, float]
    conditions: tuple[ActiveCondition, ...]
    left_out: int
    layers: tuple[Names, ...]
    schemas: tuple[SchemaEntry, ...]
    ranks: tuple[RankEntry, ...]


class _Kind(Struct, frozen=True):
    format: str = ""
    version: int = 0


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON; what is not valid UTF-8 in names becomes question marks."""
    return msgspec.json.format(msgspec.json.encode(_utf8(msgspec.to_builtins(manifest))), indent=1)


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in `data`. Raises FlightError, naming the problem."""
    try:
        kind = msgspec.json.decode(data, type=_Kind)
        if kind.format != FORMAT:
            raise FlightError("not a flight record: its manifest is of another kind")
        if kind.version != VERSION:
            raise FlightError(f"format version {kind.version}; this release reads {VERSION}")
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise FlightError(f"its manifest cannot be read: {error}") from error


def names_of(schema: Schema) -> Names:
    """Return the layers of a schema."""
    return Names(
        names=tuple(layer.name for layer in schema.layers),
        shares=tuple(layer.share for layer in schema.layers),
        elements=tuple(layer.elements for layer in schema.layers),
    )


def schema_entry(schema: Schema, layers: int) -> SchemaEntry:
    """Return the entry of a schema whose layers are at an index."""
    return SchemaEntry(
        step_columns=schema.step_columns,
        families=schema.families,
        shares=schema.shares,
        layers=layers,
        facts=schema.facts,
    )


def schema_of(entry: SchemaEntry, layers: tuple[Names, ...]) -> Schema:
    """Return the schema of an entry. Raises FlightError for a reference to something missing."""
    try:
        known = layers[entry.layers]
        rows = zip(known.names, known.shares, known.elements, strict=True)
        found = tuple(Layer(name=n, share=share, elements=e) for n, share, e in rows)
    except (IndexError, ValueError) as error:
        raise FlightError(f"its manifest contradicts itself: {error}") from error
    if any(not 0 <= layer.share < len(entry.shares) for layer in found):
        raise FlightError("its manifest contradicts itself: a layer of no share")
    return Schema(
        step_columns=entry.step_columns,
        families=entry.families,
        shares=entry.shares,
        layers=found,
        facts=entry.facts,
    )


def _utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_utf8(key): _utf8(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_utf8(item) for item in value]
    return value
