"""The manifest of a flight record, and the bounds that its archive must keep.

The manifest of a flight record's file: its ranks, schemas and arrays.
The file `node<k>.npz` is a zip archive of NumPy arrays, as `numpy.savez` writes them, with
`manifest.json` next to the arrays. A zip has a checksum of each member and its directory at the
end, so that a truncated file is detected; every language can read it, and
`unzip -p node0.npz manifest.json` shows what it is. Arrays are little-endian, float64 or int64; NaN
means "not observed".
"""

import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite, prod
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Struct

from mp_agent.errors import FlightError
from mp_agent.inputs.files import open_regular
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.flight import FlightRequest
from mp_agent.records.schema import FamilyColumns, Layer, RankIdentity, Schema, Share
from mp_agent.records.steps import EndReason, FloatArray, RankState

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


FILE_BYTES_MAX = 1 << 30
UNPACKED_BYTES_MAX = 1 << 30
MANIFEST_BYTES_MAX = 64 << 20
DIRECTORY_BYTES_MAX = 16 << 20
WORLD_SIZE_MAX = 1 << 17
ROWS_MAX = 1_000_000
"""Most rows of all ranks of a file."""
ABSENCES_MAX = 1 << 25
"""Ranks times steps: so many may be named as absent."""
LAYERS_MAX = 4_000_000
"""Most layers of all schemas of a file."""
TABLES_BYTES_MAX = 8 << 30
"""Most bytes of all layer tables of all ranks, although equal ones are stored once."""
_UNIX_SECONDS_MAX = 1e11
_PLAIN, _DEFLATED = 0, 8
_ENCRYPTED = 1

_END = struct.Struct("<4s4H2LH")
_END_MARK = b"PK\5\6"
_END64_MARK = b"PK\6\7"
_END64_BYTES = 20
_COMMENT_BYTES_MAX = 1 << 16


@contextmanager
def bounded_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive whose directory says that all of it is within the bounds.

    What is unpacked later is not more than the directory says. Raises OSError, BadZipFile and
    FlightError.
    """
    with open_regular(path, FILE_BYTES_MAX) as file:
        _check_directory(file)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.flag_bits & _ENCRYPTED for member in members):
                raise FlightError("is encrypted")
            if any(member.compress_type not in (_PLAIN, _DEFLATED) for member in members):
                raise FlightError("is compressed by a method that flight records do not have")
            sizes = {member.filename: member.file_size for member in members}
            if sizes.get(MANIFEST, 0) > MANIFEST_BYTES_MAX:
                raise FlightError(
                    f"its manifest has {sizes[MANIFEST]} bytes, more than {MANIFEST_BYTES_MAX}"
                )
            total = sum(member.file_size for member in members)
            if total > UNPACKED_BYTES_MAX:
                raise FlightError(f"has {total} bytes unpacked, more than {UNPACKED_BYTES_MAX}")
            yield archive


def _check_directory(file: BinaryIO) -> None:
    """Check the size of an archive's directory, which `zipfile` reads at once."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _COMMENT_BYTES_MAX - _END.size - _END64_BYTES))
    tail = file.read()
    at = tail.rfind(_END_MARK)
    if at < 0 or at + _END.size > len(tail):
        raise zipfile.BadZipFile("it has no directory")
    directory_bytes = _END.unpack_from(tail, at)[5]
    of_many = tail[max(0, at - _END64_BYTES) : at].startswith(_END64_MARK)
    if of_many or directory_bytes > DIRECTORY_BYTES_MAX:
        raise FlightError(f"its directory has more than {DIRECTORY_BYTES_MAX} bytes")
    file.seek(0)


def check_manifest(manifest: Manifest) -> None:
    """Raise FlightError for numbers that no run has, or that make the analysis endless."""
    for entry in manifest.ranks:
        identity = entry.identity
        size = identity.world_size
        if not 1 <= size <= WORLD_SIZE_MAX:
            raise FlightError(f"world_size is {size}; it is 1 to {WORLD_SIZE_MAX}")
        if not (0 <= identity.rank < size and 0 <= identity.node_rank < size):
            raise FlightError(
                f"rank {identity.rank} of node {identity.node_rank} is none of {size} ranks"
            )
    moments = [manifest.written_unix_seconds, manifest.request.requested_unix_seconds]
    moments += [condition.since_unix_seconds for condition in manifest.conditions]
    if trigger := manifest.request.trigger:
        moments += [trigger.time_unix_seconds, trigger.condition.since_unix_seconds]
    moments += [entry.state.phase_unix_ns / 1e9 for entry in manifest.ranks]
    moments += [entry.identity.created_unix_ns / 1e9 for entry in manifest.ranks]
    for moment in moments:
        if not (isfinite(moment) and 0.0 <= moment < _UNIX_SECONDS_MAX):
            raise FlightError(f"a time is {moment:g} s since 1970")
    known = manifest.layers
    layers = sum(
        len(known[schema.layers].names)
        for schema in manifest.schemas
        if 0 <= schema.layers < len(known)
    )
    if layers > LAYERS_MAX:
        raise FlightError(f"its schemas have {layers} layers, more than {LAYERS_MAX}")


def check_rows(steps_by_rank: Mapping[int, int], world_size: int) -> None:
    """Raise FlightError for more steps than can be analysed. steps_by_rank: by place in a file."""
    total = sum(steps_by_rank.values())
    absences = world_size * max(steps_by_rank.values(), default=0)
    if total > ROWS_MAX or absences > ABSENCES_MAX:
        raise FlightError(f"has {total} rows, of {world_size} ranks: more than can be analysed")


def check_tables(sizes_bytes: Iterable[int]) -> None:
    """Raise FlightError for more layer tables than can be analysed."""
    if (total := sum(sizes_bytes)) > TABLES_BYTES_MAX:
        raise FlightError(f"its layers have {total} bytes, more than {TABLES_BYTES_MAX}")


def read_array(file: IO[bytes], size_bytes: int) -> FloatArray:
    """Return the array of a member that holds so many bytes. Raises ValueError for another.

    The header alone would have memory allocated for a shape of any size.
    """
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"an array has format {version}")
    try:
        shape, fortran, kind = np.lib.format.read_array_header_1_0(file)
    except Exception as error:  # NumPy takes a header for Python: its tokens, syntax and values
        raise ValueError(f"an array's header cannot be read: {error}") from error
    header_bytes = file.tell()
    if kind.hasobject or kind.itemsize != 8 or (fortran and len(shape) > 1):
        raise ValueError(f"an array holds {kind}")
    if min(shape, default=0) < 0 or prod(shape) * kind.itemsize != size_bytes - header_bytes:
        raise ValueError(f"an array of shape {shape} has {size_bytes - header_bytes} bytes")
    array: FloatArray = np.frombuffer(file.read(), dtype=kind).reshape(shape)
    return array
