"""Limits the size of a record by dropping its oldest rows."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mp_agent.records.flight import NodeRecord, RankLog, Segment
from mp_agent.records.steps import LayerTable, StepRecord

_Row = TypeVar("_Row", StepRecord, LayerTable)

_FIXED_STEP_BYTES = 24
_FIXED_LAYER_BYTES = 16


def within(record: NodeRecord, bytes_max: int) -> NodeRecord:
    """Return the record without its oldest layer tables, then steps, within `bytes_max`.

    Sizes are before compression; tables that are equal on several ranks count once.
    """
    digests = {
        id(rows): hashlib.blake2b(rows.tobytes(), digest_size=16).digest()
        for segment in _segments(record.ranks)
        for table in segment.tables
        for rows in table.families.values()
    }
    fixed = _names_bytes(record.ranks)
    rest = bytes_max - fixed - sum(_step_bytes(record.ranks).values())
    tables_since = _cut(_table_bytes(record.ranks, digests), rest)
    ranks = [_since(log, tables=tables_since) for log in record.ranks]
    rest = bytes_max - fixed - sum(_table_bytes(ranks, digests).values())
    steps_since = _cut(_step_bytes(ranks), rest)
    ranks = [_since(log, steps=steps_since) for log in ranks]
    left_out = _count(record.ranks) - _count(ranks)
    if not left_out:
        return record
    return replace(record, ranks=tuple(ranks), left_out=record.left_out + left_out)


def _cut(bytes_by_sequence: Mapping[int, int], bytes_max: int) -> int:
    """Return the first sequence from which everything fits; 0 if all of it does."""
    total = 0
    ascending = sorted(bytes_by_sequence)
    for sequence in reversed(ascending):
        total += bytes_by_sequence[sequence]
        if total > bytes_max:
            return sequence + 1
    return 0


def _names_bytes(ranks: Sequence[RankLog]) -> int:
    distinct = {segment.schema.layers for segment in _segments(ranks)}
    return sum(len(layer.name) + _FIXED_LAYER_BYTES for layers in distinct for layer in layers)


def _table_bytes(ranks: Sequence[RankLog], digests: Mapping[int, bytes]) -> dict[int, int]:
    found: dict[int, dict[bytes, int]] = {}
    for segment in _segments(ranks):
        for table in segment.tables:
            sizes = found.setdefault(table.sequence, {})
            sizes.update((digests[id(rows)], rows.nbytes) for rows in table.families.values())
    return {sequence: sum(sizes.values()) for sequence, sizes in found.items()}


def _step_bytes(ranks: Sequence[RankLog]) -> dict[int, int]:
    found: dict[int, int] = {}
    for segment in _segments(ranks):
        for step in segment.steps:
            size = step.values.nbytes + _FIXED_STEP_BYTES
            size += sum(rows.nbytes for rows in step.families.values())
            found[step.sequence] = found.get(step.sequence, 0) + size
    return found


def _since(log: RankLog, *, tables: int = 0, steps: int = 0) -> RankLog:
    return replace(
        log,
        segments=tuple(
            replace(
                segment,
                tables=_rows_since(segment.tables, tables),
                steps=_rows_since(segment.steps, steps),
            )
            for segment in log.segments
        ),
    )


def _rows_since(rows: tuple[_Row, ...], sequence: int) -> tuple[_Row, ...]:
    return tuple(row for row in rows if row.sequence >= sequence)


def _count(ranks: Sequence[RankLog]) -> int:
    return sum(len(segment.steps) + len(segment.tables) for segment in _segments(ranks))


def _segments(ranks: Sequence[RankLog]) -> Iterator[Segment]:
    for log in ranks:
        yield from log.segments
