"""One attempt of a run on this node: its ranks, and the steps that are being put together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mp_agent.node.assemble import Assembler
from mp_agent.node.liveness import run_end
from mp_agent.node.merge import RankStep, merge_step, observed_columns
from mp_agent.node.merge_layers import MergedLayers, RankLayers, merge_layers
from mp_agent.node.shares import AssumedShares, Roster, make_roster
from mp_agent.node.source import Delivery, RankSource
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import RankIdentity, Schema
from mp_agent.records.steps import EndReason

TABLE_LAG_STEPS = 8
"""A probe writes the layers of a step at most so many steps after it (on CUDA, after trouble)."""


@dataclass(frozen=True, slots=True, eq=False)
class ClosedStep:
    """A merged step, and the columns that each of its ranks observed."""

    step: MergedStep
    ranks: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, slots=True, eq=False)
class ClosedLayers:
    """The merged layers of a sampled step."""

    sequence: int
    layers: MergedLayers


class Attempt:
    """Reads all ranks of an attempt and yields what is merged, each step once and in order."""

    def __init__(
        self,
        deadline_seconds: float,
        *,
        closed_sequence: int = 0,
        closed_layers_sequence: int = 0,
        assumed: Mapping[str, bool] | None = None,
    ) -> None:
        self.sources: dict[int, RankSource] = {}
        self.steps: Assembler[RankStep] = Assembler(deadline_seconds, closed_sequence)
        self.tables: Assembler[RankLayers] = Assembler(deadline_seconds, closed_layers_sequence)
        self.assumed = AssumedShares(assumed)
        self._dropped = 0
        self._schemas: dict[int, Schema] = {}
        self._roster: Roster | None = None

    @property
    def identity(self) -> RankIdentity:
        """Of the lowest local rank."""
        return self.sources[min(self.sources)].identity

    @property
    def end(self) -> EndReason:
        """How the attempt ended on this node; RUNNING while a rank goes on."""
        return run_end([source.end for source in self.sources.values()])

    @property
    def lost_here(self) -> int:
        """Records that never entered a merge: overwritten, misfit, or later than the deadline."""
        return self._dropped + self.steps.late

    def add(self, source: RankSource) -> None:
        """Take a rank in."""
        self.sources[source.identity.rank] = source

    def poll(self, now_seconds: float) -> Iterator[ClosedStep | ClosedLayers]:
        """Read all rings and yield what they complete; a step always before its layers."""
        self._read(now_seconds)
        for _, steps in self.steps.close_ready(self._awaited_ranks(), now_seconds):
            yield self._merge_step(steps)
        ready = self.tables.close_ready(
            self._awaited_ranks(), now_seconds, up_to=self.steps.closed_sequence
        )
        for sequence, tables in ready:
            yield self._merge_layers(sequence, tables)

    def close_all(self) -> Iterator[ClosedStep | ClosedLayers]:
        """Yield what is still open: nothing more will come."""
        for _, steps in self.steps.close_all():
            yield self._merge_step(steps)
        for sequence, tables in self.tables.close_all():
            yield self._merge_layers(sequence, tables)

    def close(self) -> None:
        """Let go of all rings."""
        for source in self.sources.values():
            source.close()

    def _read(self, now_seconds: float) -> None:
        for rank, source in self.sources.items():
            for delivery in source.poll():
                self._dropped += delivery.dropped
                if delivery.schema is not None:
                    self._take(rank, delivery.schema, delivery, now_seconds)
            self.tables.advance(rank, source.position - TABLE_LAG_STEPS)

    def _take(self, rank: int, schema: Schema, delivery: Delivery, now_seconds: float) -> None:
        if self._schemas.get(rank) is not schema:
            self._schemas[rank] = schema
            self._roster = None
        for step in delivery.steps:
            self.steps.add(rank, step.sequence, RankStep(rank, schema, step), now_seconds)
        for table in delivery.tables:
            self.tables.add(rank, table.sequence, RankLayers(rank, schema, table.rows), now_seconds)

    def _awaited_ranks(self) -> set[int]:
        """Return the ranks from which more can come, those that have not shown up yet included."""
        ranks = {rank for rank, source in self.sources.items() if source.end is EndReason.RUNNING}
        for identity in [source.identity for source in self.sources.values()]:
            ranks |= self._unseen_neighbours(identity)
        return ranks

    def _unseen_neighbours(self, identity: RankIdentity) -> set[int]:
        """Return the ranks of a node that have no ring yet, if their numbers can be told."""
        local = [s for s in self.sources.values() if s.identity.node_rank == identity.node_rank]
        if len(local) >= identity.local_world_size:
            return set()
        first = identity.rank - identity.local_rank
        return set(range(first, first + identity.local_world_size)) - set(self.sources)

    def _known(self) -> Roster:
        if self._roster is None:
            self._roster = make_roster(self.identity.world_size, self._schemas)
        return self._roster

    def _merge_step(self, steps: Mapping[int, RankStep]) -> ClosedStep:
        merged = merge_step(list(steps.values()), self._known(), self.assumed)
        columns = {rank: observed_columns(step.schema, step.record) for rank, step in steps.items()}
        return ClosedStep(merged, columns)

    def _merge_layers(self, sequence: int, tables: Mapping[int, RankLayers]) -> ClosedLayers:
        layers = merge_layers(list(tables.values()), self._known(), self.assumed)
        return ClosedLayers(sequence, layers)
