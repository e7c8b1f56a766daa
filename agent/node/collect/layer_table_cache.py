"""Keeps the layer tables that were read last: a ring holds only the last four."""

from collections.abc import Sequence
from dataclasses import dataclass

from mp_agent.records.flight import Segment
from mp_agent.records.schema import Schema
from mp_agent.records.steps import LayerTable

BYTES_MAX = 64 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class CachedTable:
    """A rank's layer table, with its schema."""

    rank: int
    schema: Schema
    table: LayerTable

    def segment(self) -> Segment:
        """Return it as a segment of a flight record."""
        return Segment(schema=self.schema, tables=(self.table,))


class LayerTableCache:
    """Keeps tables of all local ranks within a byte limit; evicts the oldest step first."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._tables: dict[int, list[CachedTable]] = {}

    def put(self, rank: int, schema: Schema, tables: Sequence[LayerTable]) -> None:
        """Add tables of a rank."""
        for table in tables:
            self._tables.setdefault(table.sequence, []).append(CachedTable(rank, schema, table))
            self._bytes += table.size_bytes
        while self._bytes > self._bytes_max:
            oldest = self._tables.pop(min(self._tables))
            self._bytes -= sum(kept.table.size_bytes for kept in oldest)

    @property
    def tables(self) -> tuple[CachedTable, ...]:
        """All cached tables, by step."""
        return tuple(kept for sequence in sorted(self._tables) for kept in self._tables[sequence])
