"""One attempt of a run on this node: reads its ranks' rings and reduces their rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mp_agent.node.collect.assembler import Assembler
from mp_agent.node.collect.layer_table_cache import LayerTableCache
from mp_agent.node.collect.liveness import run_end
from mp_agent.node.collect.rank_source import RankSource, RingBatch
from mp_agent.node.merge.node_layers import RankLayers, reduce_layers
from mp_agent.node.merge.node_steps import RankStep, observed_columns, reduce_step
from mp_agent.node.merge.schema_index import SchemaIndex
from mp_agent.records.reports.rows import NodeLayers, NodeStep, RankStatus
from mp_agent.records.schema import RankIdentity, Schema
from mp_agent.records.steps import EndReason
from mp_agent.records.text import as_utf8

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
        self._schemas: dict[int, Schema] = {}

    @property
    def seen(self) -> bool:
        """Whether a ring of this node has been found."""
        return bool(self.sources)

    @property
    def identity(self) -> RankIdentity:
        """Of the lowest local rank. Only once a rank was `seen`."""
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
        """Records that never entered a row: overwritten, misfit, or later than the deadline."""
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
        for _, steps in self.steps.close_ready(self._awaited_ranks(), now_seconds):
            yield self._reduce_step(steps)
        ready = self.tables.close_ready(
            self._awaited_ranks(), now_seconds, up_to=self.steps.closed_sequence
        )
        for sequence, tables in ready:
            yield reduce_layers(sequence, list(tables.values()), self.schema_index)

    def close_all(self) -> Iterator[LocalStep | NodeLayers]:
        """Yield everything that is still open: no more rows will arrive."""
        for _, steps in self.steps.close_all():
            yield self._reduce_step(steps)
        for sequence, tables in self.tables.close_all():
            yield reduce_layers(sequence, list(tables.values()), self.schema_index)

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
        phase_name=as_utf8(state.phase_name),
        started_sequence=state.started_sequence,
        committed_sequence=state.committed_sequence,
        end=source.end,
    )
