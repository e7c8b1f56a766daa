"""The data on one attempt of a run: its ranks' rows, and what its node agents knew besides."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from mp_agent.alerting.values import Values, values_in_force
from mp_agent.flight.record.gpu_errors import GpuError
from mp_agent.flight.record.limits import recorded_values
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.flight import NodeRecord, RankLog, Segment
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import LayerTable, StepRecord

_Row = TypeVar("_Row", StepRecord, LayerTable)

_SAME_START_NS = 600 * 10**9
"""The ranks of an attempt start together; skewed clocks and slow imports separate them by no more
than this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """One attempt of a run. `ranks` holds each rank once, ascending."""

    source: Path
    ranks: tuple[RankLog, ...]
    read_unix_seconds: float
    """When the ranks' states were read: up to then they had written nothing more."""
    values: Values = field(default_factory=values_in_force)
    """The thresholds and durations that the run was judged by."""
    reasons: tuple[str, ...] = ()
    """Why the records were made; empty when the rows come from shared memory."""
    conditions: tuple[ActiveCondition, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    gpu_errors: tuple[GpuError, ...] = ()
    """Of the machines of the run, where someone gave them."""
    notes: tuple[str, ...] = ()
    """What could not be read, or was omitted."""

    @property
    def identity(self) -> RankIdentity:
        """Of the lowest rank."""
        return self.ranks[0].identity

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts of the lowest rank that knows them."""
        segments = (segment for log in self.ranks for segment in reversed(log.segments))
        return next((dict(segment.schema.facts) for segment in segments), {})


def one_attempt(logs: Iterable[RankLog]) -> tuple[RankLog, ...]:
    """Return the ranks of the newest attempt among the logs, each once, ascending.

    Logs of the same process become one: rows of both, the state of the later one.
    """
    logs = list(logs)
    newest = max(logs, key=lambda log: log.identity.created_unix_ns, default=None)
    if newest is None:
        return ()
    found: dict[int, RankLog] = {}
    for log in sorted(logs, key=_age):
        if _belongs(log.identity, newest.identity):
            known = found.get(log.identity.rank)
            same = known is not None and known.identity == log.identity
            found[log.identity.rank] = _joined(known, log) if known and same else log
    return tuple(found[rank] for rank in sorted(found))


def gather(
    source: Path, records: Sequence[NodeRecord], notes: Sequence[str] = ()
) -> Evidence | None:
    """Return the evidence that a run's records hold on its newest attempt; None without a rank."""
    ranks = one_attempt(log for record in records for log in record.ranks)
    if not ranks:
        return None
    kept = {log.identity for log in ranks}
    used = [r for r in records if any(log.identity in kept for log in r.ranks)]
    used.sort(key=lambda record: record.written_unix_seconds)
    left_out = sum(record.left_out for record in used)
    return Evidence(
        source=source,
        ranks=ranks,
        values=recorded_values(used[-1].thresholds, used[-1].settings),
        read_unix_seconds=used[-1].written_unix_seconds,
        reasons=tuple(dict.fromkeys(record.request.reason for record in used)),
        conditions=_conditions(used),
        settings=used[-1].settings,
        versions=used[-1].versions,
        notes=(*notes, *([f"{left_out} rows were omitted for size"] if left_out else [])),
    )


def _age(log: RankLog) -> tuple[int, int, int]:
    state = log.state
    return (log.identity.created_unix_ns, state.committed_sequence, state.phase_unix_ns)


def _belongs(identity: RankIdentity, newest: RankIdentity) -> bool:
    return (
        identity.run == newest.run
        and identity.world_size == newest.world_size
        and identity.attempt == newest.attempt
        and newest.created_unix_ns - identity.created_unix_ns <= _SAME_START_NS
    )


def _joined(earlier: RankLog, later: RankLog) -> RankLog:
    """Return both logs of a process as one; segments of the same schema become one."""
    segments: dict[int, Segment] = {}
    for segment in (*earlier.segments, *later.segments):
        index = next((i for i, s in segments.items() if s.schema == segment.schema), None)
        if index is None:
            segments[len(segments)] = segment
        else:
            known = segments[index]
            segments[index] = replace(
                known,
                steps=_union(known.steps, segment.steps),
                tables=_union(known.tables, segment.tables),
            )
    return replace(later, segments=tuple(segments.values()))


def _union(earlier: tuple[_Row, ...], later: tuple[_Row, ...]) -> tuple[_Row, ...]:
    rows: dict[int, _Row] = {row.sequence: row for row in earlier}
    rows.update({row.sequence: row for row in later})
    return tuple(rows[sequence] for sequence in sorted(rows))


def _conditions(records: Sequence[NodeRecord]) -> tuple[ActiveCondition, ...]:
    """Return the conditions in any record, each as first recorded."""
    found: dict[tuple[str, str], ActiveCondition] = {}
    for record in records:
        trigger = record.request.trigger
        named = (*record.conditions, *([trigger.condition] if trigger else []))
        for condition in named:
            found.setdefault((condition.name, condition.severity), condition)
    return tuple(found.values())
