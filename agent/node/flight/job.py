"""One node's flight record: collects its contents and writes it."""

import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import SecretStr

from mp_agent.errors import FlightError
from mp_agent.flight.record.evidence import Evidence, one_attempt
from mp_agent.flight.record.limits import values_of
from mp_agent.flight.record.store import write_record
from mp_agent.node.collect.layer_table_cache import CachedTable
from mp_agent.node.flight.rank_logs import newest_sequence, read_rank_logs
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.flight import FlightRequest, NodeRecord, RankLog
from mp_agent.ring import locations
from mp_agent.settings import Settings
from mp_agent.version import __version__


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
        thresholds=dict(values_of(settings).limits),
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
