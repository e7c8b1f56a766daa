"""Reads the rings of a run as logs for a flight record; read-only, never waits for a rank."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from mp_agent.errors import RingError
from mp_agent.flight.record.evidence import one_attempt
from mp_agent.node.collect.rank_source import RankSource
from mp_agent.records.flight import RankLog, Segment
from mp_agent.ring.reader import RingReader

log = logging.getLogger("mp_agent.node")


def read_rank_logs(
    rings: Iterable[Path], *, first: int | None = None, last: int | None = None, steps: int
) -> tuple[tuple[RankLog, ...], list[str]]:
    """Return the logs of the newest attempt's ranks, and the problems met while reading.

    Steps are those from sequence number `first` to `last`; without these, the last `steps` of
    them. Layer tables are all up to the last step.
    """
    logs, problems = [], []
    for path in rings:
        try:
            with closing(RingReader.open(path)) as reader:
                logs.append(_read(path, reader, first, steps))
        except (RingError, OSError, ValueError) as error:
            problems.append(str(error))
    ranks = one_attempt(logs)
    end = newest_sequence(ranks) if last is None else last
    begin = end - steps + 1 if first is None else first
    return tuple(_restricted(known, begin, end) for known in ranks), problems


def newest_sequence(ranks: Sequence[RankLog]) -> int:
    """Return the last step that any rank has written."""
    segments = (segment for known in ranks for segment in known.segments)
    return max((step.sequence for segment in segments for step in segment.steps), default=0)


def _read(path: Path, reader: RingReader, first: int | None, steps: int) -> RankLog:
    # Without a first step, more than requested: the last step is known only from all ranks.
    after = reader.state.committed_sequence - 2 * steps if first is None else first - 1
    source = RankSource(path, reader, after=max(0, after))
    segments = [
        Segment(
            schema=batch.schema,
            steps=tuple(batch.steps),
            tables=tuple(batch.tables),
        )
        for batch in source.poll()
        if batch.schema is not None
    ]
    return RankLog(
        identity=source.identity,
        state=source.state,
        end=source.end,
        segments=tuple(segments),
    )


def _restricted(known: RankLog, first: int, last: int) -> RankLog:
    segments = (
        replace(
            segment,
            steps=tuple(step for step in segment.steps if first <= step.sequence <= last),
            tables=tuple(table for table in segment.tables if table.sequence <= last),
        )
        for segment in known.segments
    )
    kept = [segment for segment in segments if segment.steps or segment.tables]
    return replace(known, segments=tuple(kept))
