"""Writes and reads one node's file of a flight record; `manifest` describes its contents."""

import hashlib
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from mp_agent.errors import FlightError
from mp_agent.flight.record.manifest import (
    MANIFEST,
    FamilyEntry,
    Manifest,
    Names,
    RankEntry,
    SchemaEntry,
    SegmentEntry,
    TableEntry,
    bounded_archive,
    check_manifest,
    check_rows,
    check_tables,
    decode_manifest,
    encode_manifest,
    names_of,
    read_array,
    schema_entry,
    schema_of,
)
from mp_agent.records.flight import NodeRecord, RankLog, Segment
from mp_agent.records.schema import FamilyColumns, Schema
from mp_agent.records.steps import FloatArray, LayerTable, StepRecord

_COMPRESSION = 1
"""Halves the size in a tenth of the default's time: a node writes during training."""

_DAMAGE = (
    KeyError,
    ValueError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    struct.error,
    zlib.error,
    MemoryError,
)
"""What reading an inconsistent archive raises."""

Array = npt.NDArray[np.float64] | npt.NDArray[np.int64]


def write_archive(file: IO[bytes], record: NodeRecord) -> None:
    """Write a node's record. Raises OSError when it cannot be written."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
        writer = _Writer(archive)
        ranks = tuple(writer.rank(log) for log in record.ranks)
        manifest = Manifest(
            request=record.request,
            run=record.run,
            node_rank=record.node_rank,
            host=record.host,
            written_unix_seconds=record.written_unix_seconds,
            versions=dict(record.versions),
            settings=dict(record.settings),
            thresholds=dict(record.thresholds),
            conditions=record.conditions,
            left_out=record.left_out,
            layers=tuple(writer.layers),
            schemas=tuple(writer.schemas),
            ranks=ranks,
        )
        archive.writestr(MANIFEST, encode_manifest(manifest))


def read_archive(path: Path) -> NodeRecord:
    """Return the record in a file. Raises FlightError, naming the path and the problem."""
    try:
        with bounded_archive(path) as archive:
            return _Reader(archive).record()
    except OSError as error:
        raise FlightError(f"{path}: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        raise FlightError(f"{path}: not a flight record, or truncated ({error})") from error
    except FlightError as error:
        raise FlightError(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise FlightError(f"{path}: damaged: {error}") from error


class _Writer:
    """Writes arrays into an archive; equal names and equal tables are written once."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._tables: dict[bytes, str] = {}
        self.layers: list[Names] = []
        self.schemas: list[SchemaEntry] = []
        self._layer_index: dict[Names, int] = {}
        self._schema_index: dict[Schema, int] = {}

    def rank(self, log: RankLog) -> RankEntry:
        base = f"rank{log.identity.rank}"
        return RankEntry(
            identity=log.identity,
            state=log.state,
            end=log.end,
            segments=tuple(
                self._segment(f"{base}/{number}", segment)
                for number, segment in enumerate(log.segments)
            ),
        )

    def _segment(self, base: str, segment: Segment) -> SegmentEntry:
        schema, steps = segment.schema, segment.steps
        values = [step.values for step in steps]
        return SegmentEntry(
            schema=self._schema(schema),
            sequence=self._integers(f"{base}/sequence", [step.sequence for step in steps]),
            step=self._integers(f"{base}/step", [step.step for step in steps]),
            time_unix_ns=self._integers(f"{base}/time", [step.time_unix_ns for step in steps]),
            values=self._floats(f"{base}/values", values, (len(schema.step_columns),)),
            families={
                family.name: self._family(f"{base}/{number}", family, segment)
                for number, family in enumerate(schema.families)
            },
            tables=tuple(
                TableEntry(sequence=table.sequence, families=self._table(table))
                for table in segment.tables
            ),
        )

    def _family(self, base: str, family: FamilyColumns, segment: Segment) -> FamilyEntry:
        places = [n for n, step in enumerate(segment.steps) if family.name in step.families]
        rows = [segment.steps[place].families[family.name] for place in places]
        shape = (len(segment.schema.shares), len(family.columns))
        return FamilyEntry(
            places=self._integers(f"{base}/places", places),
            rows=self._floats(f"{base}/rows", rows, shape),
        )

    def _schema(self, schema: Schema) -> int:
        if schema not in self._schema_index:
            names = names_of(schema)
            if names not in self._layer_index:
                self._layer_index[names] = len(self.layers)
                self.layers.append(names)
            self._schema_index[schema] = len(self.schemas)
            self.schemas.append(schema_entry(schema, self._layer_index[names]))
        return self._schema_index[schema]

    def _table(self, table: LayerTable) -> dict[str, str]:
        return {name: self._layer_rows(rows) for name, rows in table.families.items()}

    def _layer_rows(self, rows: FloatArray) -> str:
        rows = np.ascontiguousarray(rows, dtype="<f8")
        digest = hashlib.blake2b(rows.tobytes(), digest_size=16).digest()
        if digest not in self._tables:
            self._tables[digest] = self._write(f"layers/{len(self._tables)}", rows)
        return self._tables[digest]

    def _integers(self, name: str, numbers: list[int]) -> str:
        return self._write(name, np.array(numbers, dtype="<i8"))

    def _floats(self, name: str, rows: list[FloatArray], shape: tuple[int, ...]) -> str:
        return self._write(name, np.array(rows, dtype="<f8").reshape(len(rows), *shape))

    def _write(self, name: str, array: Array) -> str:
        member = f"{name}.npy"
        with self._archive.open(member, "w", force_zip64=True) as file:
            np.lib.format.write_array(file, array, allow_pickle=False)
        return member


class _Reader:
    """Reads an archive; inconsistent contents raise ValueError, KeyError or FlightError."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        if MANIFEST not in archive.namelist():
            raise FlightError("not a flight record: it has no manifest")
        self._manifest = decode_manifest(archive.read(MANIFEST))
        check_manifest(self._manifest)
        self._schemas = [
            schema_of(entry, self._manifest.layers) for entry in self._manifest.schemas
        ]
        self._arrays: dict[str, FloatArray] = {}

    def record(self) -> NodeRecord:
        manifest = self._manifest
        self._check_amount()
        return NodeRecord(
            request=manifest.request,
            run=manifest.run,
            node_rank=manifest.node_rank,
            host=manifest.host,
            written_unix_seconds=manifest.written_unix_seconds,
            versions=manifest.versions,
            settings=manifest.settings,
            thresholds=manifest.thresholds,
            conditions=manifest.conditions,
            ranks=tuple(self._rank(entry) for entry in manifest.ranks),
            left_out=manifest.left_out,
        )

    def _check_amount(self) -> None:
        """Check what the ranks refer to in all: one array may be referred to many times."""
        ranks = self._manifest.ranks
        steps = {
            place: sum(len(self._array(segment.sequence, "i")) for segment in entry.segments)
            for place, entry in enumerate(ranks)
        }
        check_rows(steps, max((entry.identity.world_size for entry in ranks), default=0))
        check_tables(
            self._array(member, "f").nbytes
            for entry in ranks
            for segment in entry.segments
            for table in segment.tables
            for member in table.families.values()
        )

    def _rank(self, entry: RankEntry) -> RankLog:
        return RankLog(
            identity=entry.identity,
            state=entry.state,
            end=entry.end,
            segments=tuple(self._segment(segment) for segment in entry.segments),
        )

    def _segment(self, entry: SegmentEntry) -> Segment:
        if not 0 <= entry.schema < len(self._schemas):
            raise ValueError(f"no schema {entry.schema}")
        schema = self._schemas[entry.schema]
        sequences = self._array(entry.sequence, "i").tolist()
        families = self._families(entry, schema, len(sequences))
        rows = zip(
            sequences,
            self._array(entry.step, "i").tolist(),
            self._array(entry.time_unix_ns, "i").tolist(),
            self._shaped(entry.values, (len(sequences), len(schema.step_columns))),
            families,
            strict=True,
        )
        return Segment(
            schema=schema,
            steps=tuple(
                StepRecord(
                    sequence=sequence,
                    step=step,
                    time_unix_ns=time_unix_ns,
                    values=values,
                    families=found,
                )
                for sequence, step, time_unix_ns, values, found in rows
            ),
            tables=tuple(
                LayerTable(
                    sequence=table.sequence,
                    families={
                        name: self._table(member, schema, name)
                        for name, member in table.families.items()
                    },
                )
                for table in entry.tables
            ),
        )

    def _families(
        self, entry: SegmentEntry, schema: Schema, steps: int
    ) -> list[dict[str, FloatArray]]:
        """Return the rows of each step by family."""
        found: list[dict[str, FloatArray]] = [{} for _ in range(steps)]
        for name, family in entry.families.items():
            places = self._array(family.places, "i").tolist()
            shape = (len(places), len(schema.shares), len(schema.columns(name)))
            for place, rows in zip(places, self._shaped(family.rows, shape), strict=True):
                if not 0 <= place < steps:
                    raise ValueError(f"{family.places} names step {place} of {steps}")
                found[place][name] = rows
        return found

    def _table(self, member: str, schema: Schema, family: str) -> FloatArray:
        rows = self._array(member, "f")
        if rows.shape != (len(schema.layers), len(schema.columns(family))):
            raise ValueError(f"{member} has shape {rows.shape}")
        return rows

    def _shaped(self, member: str, shape: tuple[int, ...]) -> FloatArray:
        array = self._array(member, "f")
        if array.shape != shape:
            raise ValueError(f"{member} has shape {array.shape}, not {shape}")
        return array

    def _array(self, member: str, kind: str) -> FloatArray:
        array = self._arrays.get(member)
        if array is None:
            size_bytes = self._archive.getinfo(member).file_size
            with self._archive.open(member) as file:
                try:
                    array = read_array(file, size_bytes)
                except ValueError as error:
                    raise ValueError(f"{member}: {error}") from error
            self._arrays[member] = array
        if array.dtype.kind != kind:
            raise ValueError(f"{member} holds {array.dtype}")
        return array
