"""Collects the records of this node's ranks into steps that are complete, or overdue."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from mp_agent.errors import FailureLog
from mp_agent.inputs.files import printable
from mp_agent.node.collect.rank_source import RankSource, RingBatch, run_end
from mp_agent.node.merge.node_layers import RankLayers, reduce_layers
from mp_agent.node.merge.node_steps import RankStep, observed_columns, reduce_step
from mp_agent.node.merge.schema_index import SchemaIndex
from mp_agent.records.flight import Segment
from mp_agent.records.node_report import NodeLayers, NodeStep, RankStatus
from mp_agent.records.schema import RankIdentity, Schema
from mp_agent.records.steps import EndReason, LayerTable

T = TypeVar("T")

PENDING_AT_MOST = 4096
"""Open steps; beyond this the oldest close early, so that memory stays bounded."""


@dataclass(slots=True)
class _Pending(Generic[T]):
    since_seconds: float
    items: dict[int, T] = field(default_factory=dict)


@dataclass(slots=True)
class Assembler(Generic[T]):
    """Groups rows by sequence number and closes the groups in ascending order.

    A sequence closes once every rank that can still deliver it has passed it, or when its first
    row has waited `deadline_seconds`. A rank that misses a deadline is not awaited again until it
    delivers something new.
    """

    deadline_seconds: float
    closed_sequence: int = 0
    pending_at_most: int = PENDING_AT_MOST
    late: int = 0
    """Rows that arrived after their sequence was closed."""
    _positions: dict[int, int] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)
    _pending: dict[int, _Pending[T]] = field(default_factory=dict)

    def add(self, rank: int, sequence: int, item: T, now_seconds: float) -> None:
        """Add one rank's row; a row of a closed sequence is counted and ignored."""
        self.advance(rank, sequence)
        if sequence <= self.closed_sequence:
            self.late += 1
            return
        self._given_up.discard(rank)
        pending = self._pending.get(sequence)
        if pending is None:
            pending = self._pending[sequence] = _Pending(now_seconds)
        pending.items[rank] = item

    def advance(self, rank: int, sequence: int) -> None:
        """Note that this rank will deliver nothing up to `sequence`."""
        if sequence > self._positions.get(rank, 0):
            self._positions[rank] = sequence

    def postpone(self, seconds: float) -> None:
        """Wait so much longer for what is pending."""
        for pending in self._pending.values():
            pending.since_seconds += seconds

    def floor(self, ranks: Collection[int]) -> int:
        """Return the sequence up to which no more rows will arrive.

        ranks: those that can still deliver; the others have delivered all they will.
        """
        awaited = [self._positions.get(rank, 0) for rank in ranks if rank not in self._given_up]
        everyone = max(self._positions.values(), default=0)
        below = min(self._pending, default=everyone + 1) - 1
        return max(min([below, *awaited], default=0), self.closed_sequence)

    def close_ready(
        self,
        ranks: Collection[int],
        now_seconds: float,
        *,
        up_to: int | None = None,
        ignore_deadline: bool = False,
    ) -> Iterator[tuple[int, Mapping[int, T]]]:
        """Yield (sequence, rows by rank) of what is complete or overdue, oldest first.

        ranks: those that can still deliver. up_to: the last sequence that may close.
        ignore_deadline: nothing is overdue.
        """
        while self._pending:
            sequence = min(self._pending)
            if up_to is not None and sequence > up_to:
                return
            late_ranks = (rank for rank in ranks if self._positions.get(rank, 0) < sequence)
            waited_seconds = now_seconds - self._pending[sequence].since_seconds
            overdue = waited_seconds >= self.deadline_seconds and not ignore_deadline
            crowded = len(self._pending) > self.pending_at_most
            # Mostly some are late, of which one is found soon.
            if not (overdue or crowded) and any(rank not in self._given_up for rank in late_ranks):
                return
            self._given_up.update(late_ranks)
            yield sequence, self._close(sequence)

    def close_all(self) -> Iterator[tuple[int, Mapping[int, T]]]:
        """Yield everything that is pending, oldest first: no more rows will arrive."""
        for sequence in sorted(self._pending):
            yield sequence, self._close(sequence)

    def _close(self, sequence: int) -> Mapping[int, T]:
        self.closed_sequence = sequence
        return self._pending.pop(sequence).items


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


TABLE_LAG_STEPS = 8
"""A probe writes the layers of a step at most this many steps later (on CUDA, after trouble)."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalStep:
    """A step of this node, and the columns that each of its ranks observed."""

    row: NodeStep
    ranks: Mapping[int, Mapping[str, float]]


class LocalAttempt:
    """Reads all ranks of an attempt on this node and yields its rows, each once and in order."""

    def __init__(
        self, deadline_seconds: float, *, closed_sequence: int = 0, closed_layers_sequence: int = 0
    ) -> None:
        self.sources: dict[int, RankSource] = {}
        self.steps: Assembler[RankStep] = Assembler(deadline_seconds, closed_sequence)
        self.tables: Assembler[RankLayers] = Assembler(deadline_seconds, closed_layers_sequence)
        self.schema_index = SchemaIndex()
        self.layer_tables = LayerTableCache()
        """The last layer tables, for flight records."""
        self._dropped = 0
        self._failures = FailureLog()
        self._schemas: dict[int, Schema] = {}

    @property
    def seen(self) -> bool:
        """Whether a ring of this node has been found."""
        return bool(self.sources)

    @property
    def identity(self) -> RankIdentity:
        """Identity of the lowest local rank; only once a rank was `seen`."""
        return self.sources[min(self.sources)].identity

    @property
    def created_unix_ns(self) -> frozenset[int]:
        """When the rings were created, by this node's clock."""
        return frozenset(source.identity.created_unix_ns for source in self.sources.values())

    @property
    def newest_sequence(self) -> int:
        """The last step that a rank of this node began or wrote."""
        states = [source.state for source in self.sources.values()]
        return max((max(s.started_sequence, s.committed_sequence) for s in states), default=0)

    @property
    def alive(self) -> bool:
        """Whether a rank is alive right now, not only at the last poll."""
        return any(source.alive for source in self.sources.values())

    @property
    def end(self) -> EndReason:
        """How the attempt ended on this node; RUNNING while a rank runs."""
        return run_end([source.end for source in self.sources.values()])

    @property
    def lost_here(self) -> int:
        """Records that never entered a row: overwritten, misfit, not to be reduced, or too late."""
        return self._dropped + self.steps.late

    @property
    def expected_ranks(self) -> set[int]:
        """The ranks of this node, including those that have no ring yet."""
        ranks = set(self.sources)
        for identity in [source.identity for source in self.sources.values()]:
            ranks |= self._unseen_neighbours(identity)
        return ranks

    @property
    def known_ranks(self) -> set[int]:
        """The ranks whose schema is known."""
        return set(self._schemas)

    @property
    def held(self) -> tuple[int, ...]:
        """Shares that the known ranks hold now: indices into the schema index's shares."""
        return self.schema_index.holdings[self.schema_index.holding(self._schemas.values())]

    @property
    def layers_position(self) -> int:
        """Sequence number up to which no more layer tables will arrive."""
        return self.tables.floor(self._awaited_ranks())

    def statuses(self) -> tuple[RankStatus, ...]:
        """Return the state of each rank."""
        return tuple(_status(source) for _, source in sorted(self.sources.items()))

    def add(self, source: RankSource) -> None:
        """Add a rank."""
        self.sources[source.identity.rank] = source

    def poll(self, now_seconds: float) -> Iterator[LocalStep | NodeLayers]:
        """Read all rings and yield the steps that are complete; each before its layers."""
        self._read(now_seconds)
        for sequence, steps in self.steps.close_ready(self._awaited_ranks(), now_seconds):
            yield from self._step(sequence, steps)
        ready = self.tables.close_ready(
            self._awaited_ranks(), now_seconds, up_to=self.steps.closed_sequence
        )
        for sequence, tables in ready:
            yield from self._layers(sequence, tables)

    def close_all(self) -> Iterator[LocalStep | NodeLayers]:
        """Yield everything that is still open: no more rows will arrive."""
        for sequence, steps in self.steps.close_all():
            yield from self._step(sequence, steps)
        for sequence, tables in self.tables.close_all():
            yield from self._layers(sequence, tables)

    def close(self) -> None:
        """Close all rings."""
        for source in self.sources.values():
            source.close()

    def _read(self, now_seconds: float) -> None:
        for rank, source in self.sources.items():
            for batch in source.poll():
                self._dropped += batch.dropped
                if batch.schema is not None:
                    self._add_batch(rank, batch.schema, batch, now_seconds)
            self.tables.advance(rank, source.position - TABLE_LAG_STEPS)

    def _add_batch(self, rank: int, schema: Schema, batch: RingBatch, now_seconds: float) -> None:
        if self._schemas.get(rank) is not schema:
            self._schemas[rank] = schema
        for step in batch.steps:
            self.steps.add(rank, step.sequence, RankStep(rank, schema, step), now_seconds)
        self.layer_tables.put(rank, schema, batch.tables)
        for table in batch.tables:
            layers = RankLayers(rank, schema, table.families)
            self.tables.add(rank, table.sequence, layers, now_seconds)

    def _awaited_ranks(self) -> set[int]:
        """Return the ranks that can still deliver, including those that have no ring yet."""
        ended = {
            rank for rank, source in self.sources.items() if source.end is not EndReason.RUNNING
        }
        return self.expected_ranks - ended

    def _unseen_neighbours(self, identity: RankIdentity) -> set[int]:
        """Return the ranks of a node that have no ring yet, if the node's ranks are consecutive."""
        local = [s for s in self.sources.values() if s.identity.node_rank == identity.node_rank]
        if len(local) >= identity.local_world_size:
            return set()
        first = identity.rank - identity.local_rank
        end = min(first + identity.local_world_size, identity.world_size)
        return set(range(first, end)) - set(self.sources)

    def _step(self, sequence: int, steps: Mapping[int, RankStep]) -> Iterator[LocalStep]:
        """Yield the step of all ranks; records that cannot be reduced are lost, and counted."""
        reduce = partial(self._reduce_step, steps)
        found = self._failures.contain(reduce, "step %d cannot be reduced", sequence)
        if found is None:
            self._dropped += len(steps)
        else:
            yield found

    def _layers(self, sequence: int, tables: Mapping[int, RankLayers]) -> Iterator[NodeLayers]:
        """Yield the layers of all ranks, as `_step`."""
        reduce = partial(reduce_layers, sequence, list(tables.values()), self.schema_index)
        found = self._failures.contain(reduce, "layers of step %d cannot be reduced", sequence)
        if found is None:
            self._dropped += len(tables)
        else:
            yield found

    def _reduce_step(self, steps: Mapping[int, RankStep]) -> LocalStep:
        schemas = {**self._schemas, **{rank: step.schema for rank, step in steps.items()}}
        holding = self.schema_index.holding([schemas[rank] for rank in sorted(schemas)])
        columns = {rank: observed_columns(step.schema, step.record) for rank, step in steps.items()}
        return LocalStep(reduce_step(list(steps.values()), self.schema_index, holding), columns)


def _status(source: RankSource) -> RankStatus:
    state = source.state
    return RankStatus(
        rank=source.identity.rank,
        phase=state.phase,
        phase_name=printable(state.phase_name),
        started_sequence=state.started_sequence,
        committed_sequence=state.committed_sequence,
        end=source.end,
    )
