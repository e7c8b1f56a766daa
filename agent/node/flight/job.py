"""Collects what a flight record needs from the ranks of this node."""

import logging
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import SecretStr

from mp_agent.errors import FlightError, RingError
from mp_agent.flight.record.evidence import Evidence, one_attempt, values_of
from mp_agent.flight.record.store import write_record
from mp_agent.node.collect.attempt import CachedTable
from mp_agent.node.collect.rank_source import RankSource
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.flight import FlightRequest, NodeRecord, RankLog, Segment
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from mp_agent.settings import Settings
from mp_agent.version import __version__

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlightJob:
    """A flight record to write."""

    request: FlightRequest
    run_dir: Path
    conditions: tuple[ActiveCondition, ...] = ()
    tables: tuple[CachedTable, ...] = ()
    """Layer tables that the rings may no longer hold."""

    def write(self, settings: Settings) -> Path:
        """Write the record and return its file.

        Raises FlightError when there is nothing to write, OSError and RingError when it cannot
        be written.
        """
        steps = self.request.last - self.request.first + 1
        ranks, problems = read_rank_logs(
            locations.find_rings(self.run_dir),
            first=self.request.first,
            last=self.request.last,
            steps=steps,
        )
        if not ranks:
            raise FlightError("; ".join(problems) or f"{self.run_dir}: holds no ring")
        record = make_record(
            self.request, with_tables(ranks, self.tables, self.request.last), settings
        )
        return write_record(
            settings.flight_dir,
            replace(record, conditions=self.conditions),
            records_max=settings.flight_records_max,
            bytes_max=settings.flight_bytes_max,
        )


def make_record(
    request: FlightRequest, ranks: tuple[RankLog, ...], settings: Settings
) -> NodeRecord:
    """Return the record of some ranks, with versions and settings."""
    identity = ranks[0].identity
    return NodeRecord(
        request=request,
        run=identity.run,
        node_rank=identity.node_rank,
        host=socket.gethostname(),
        written_unix_seconds=time.time(),
        versions={
            "mp_agent": __version__,
            "torch": identity.torch_version,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        settings=public_settings(settings),
        thresholds=dict(values_of(settings, logged=False).limits),
        ranks=ranks,
    )


def public_settings(settings: Settings) -> Mapping[str, Any]:
    """Return all settings except secrets."""
    secret = {name for name in type(settings).model_fields if _is_secret(getattr(settings, name))}
    return settings.model_dump(mode="json", exclude=secret)


def evidence_of_rings(run_dir: Path, settings: Settings) -> Evidence:
    """Return the evidence in a run's rings. Raises FlightError if there is none."""
    ranks, problems = read_rank_logs(
        locations.find_rings(run_dir), first=0, last=None, steps=settings.flight_steps
    )
    if not ranks or not newest_sequence(ranks):
        reason = problems[0] if problems else f"{run_dir}: its rings hold no step"
        raise FlightError(reason)
    identity = ranks[0].identity
    return Evidence(
        source=run_dir,
        ranks=ranks,
        values=values_of(settings),
        read_unix_seconds=time.time(),
        versions={"mp_agent": identity.version, "torch": identity.torch_version},
        notes=tuple(problems),
    )


def with_tables(
    ranks: Sequence[RankLog], tables: Sequence[CachedTable], last: int
) -> tuple[RankLog, ...]:
    """Return the ranks, extended by cached tables up to a step."""
    known = {log.identity.rank: log for log in ranks}
    cached: dict[int, list[CachedTable]] = {}
    for kept in tables:
        if kept.rank in known and kept.table.sequence <= last:
            cached.setdefault(kept.rank, []).append(kept)
    extra = [
        replace(known[rank], segments=tuple(kept.segment() for kept in found))
        for rank, found in cached.items()
    ]
    return one_attempt([*extra, *ranks])


def _is_secret(value: object) -> bool:
    return isinstance(value, SecretStr)
