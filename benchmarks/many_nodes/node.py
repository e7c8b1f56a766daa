"""A node of the simulated run: ranks without processes, and all of a node agent but its rings."""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from benchmarks.many_nodes.model import Model, sampled_up_to
from mp_agent.node.cluster.member import ClusterMember
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.collect.attempt import LocalAttempt, LocalStep
from mp_agent.node.collect.rank_source import RankSource
from mp_agent.node.merge.schema_index import SchemaIndex, _weights_name
from mp_agent.records.merged import MergedStep
from mp_agent.records.node_report import KnownNode, NodeLayers, NodeReport, RankStatus, Receipt
from mp_agent.records.schema import RankIdentity, Schema
from mp_agent.records.steps import EndReason, LayerTable, Phase, RankState, StepRecord
from mp_agent.ring.reader import RingReader
from mp_agent.settings import Settings


class SimulatedRing:
    """What a `RingReader` would read of one rank."""

    def __init__(self, model: Model, rank: int, sampled: Collection[int]) -> None:
        self.identity = model.identity(rank)
        self.schema: Schema = model.schema(rank)
        self.written = 0
        self._model = model
        self._rank = rank
        self._sampled = sampled

    @property
    def version(self) -> int:
        return self.written + 1

    @property
    def state(self) -> RankState:
        return RankState(
            phase=Phase.FORWARD,
            phase_name="forward",
            phase_unix_ns=0,
            started_sequence=self.written + 1,
            committed_sequence=self.written,
            end_reason=EndReason.RUNNING,
            scrape_wait=False,
            probe_errors=0,
            setting_errors=0,
            records_dropped=0,
            probe_seconds=0.0,
        )

    def writer_alive(self) -> bool:
        return True

    def steps_after(self, sequence: int) -> tuple[list[StepRecord], int]:
        numbers = range(sequence + 1, self.written + 1)
        return [self._model.step(self._rank, n, sampled=n in self._sampled) for n in numbers], 0

    def layers_after(self, sequence: int) -> list[LayerTable]:
        numbers = sampled_up_to(self._sampled, sequence, self.written)
        return [self._model.table(self._rank, number) for number in numbers]

    def close(self) -> None:
        return


class SimulatedAttempt(LocalAttempt):
    """The ranks of a node; what they write may be read and reduced beforehand."""

    def __init__(self, rings: Sequence[SimulatedRing], settings: Settings) -> None:
        super().__init__(settings.merge_deadline_seconds)
        self.written = 0
        """The last step that the ranks have written."""
        self._rings = rings
        self._recorded: list[tuple[list[LocalStep | NodeLayers], int]] = []
        self._delivered = 0
        for ring in rings:
            self.add(RankSource(Path(), cast(RingReader, ring)))
        if rings:
            _share_plans(self.schema_index, [ring.schema for ring in rings])

    def record(self, steps: int) -> None:
        """Reduce so many steps now, so that it takes no time later."""
        known = len(self._recorded)
        for sequence in range(known + 1, known + steps + 1):
            for ring in self._rings:
                ring.written = sequence
            # What each rank observed is for the metrics of its own node, which is not read here.
            items = [
                replace(item, ranks={}) if isinstance(item, LocalStep) else item
                for item in super().poll(0.0)
            ]
            self._recorded.append((items, super().layers_position))

    @property
    def layers_position(self) -> int:
        return self._recorded[self._delivered - 1][1] if self._delivered else 0

    def poll(self, now_seconds: float) -> Iterator[LocalStep | NodeLayers]:
        if self.written > len(self._recorded):
            self.record(self.written - len(self._recorded))
        while self._delivered < self.written:
            self._delivered += 1
            yield from self._recorded[self._delivered - 1][0]

    def statuses(self) -> tuple[RankStatus, ...]:
        return tuple(
            RankStatus(
                rank=ring.identity.rank,
                phase=Phase.FORWARD,
                phase_name="forward",
                started_sequence=self.written + 1,
                committed_sequence=self.written,
                end=EndReason.RUNNING,
            )
            for ring in self._rings
        )


def _share_plans(schema_index: SchemaIndex, schemas: Sequence[Schema]) -> None:
    """Spare the index from reading equal layers by rank: a real one has eight ranks, not 10 000.

    The ranks of a simulated run differ in their place within one share.
    """
    first = schema_index.plan(schemas[0])
    for schema in schemas[1:]:
        share = schema.shares[0]
        place = replace(first.places[0], shard=share.shard_index, replica=share.replica_index)
        schema_index._plans[id(schema)] = replace(
            first, schema=schema, places=(place,), weights=_weights_name(schema.shares)
        )


class SimulatedNode:
    """Reduces and reports as the agent of one node does; what a `Pusher` needs of a run."""

    def __init__(
        self, model: Model, number: int, settings: Settings, *, sampled: Collection[int] = ()
    ) -> None:
        self.number = number
        self.name = model.identity(0).run
        self.run_dir = Path(f"node-{number}")
        self.seen = True
        self._rings = [SimulatedRing(model, rank, sampled) for rank in model.ranks(number)]
        self.attempt = SimulatedAttempt(self._rings, settings)
        self.member = ClusterMember(self.attempt, settings, session=f"simulation-{number}")

    def write(self, newest: int) -> None:
        """Let all ranks have written their steps up to `newest`."""
        self.attempt.written = newest

    def poll(self, now_seconds: float | None = None) -> list[MergedStep | MergedTable]:
        """Read the ranks as an agent does; return what the root has merged."""
        for _ in self.member.collect(time.monotonic() if now_seconds is None else now_seconds):
            pass
        return list(self.member.merge())

    def report_dropped(self, report: NodeReport, *, too_large: bool = False) -> None:
        """Have the rows of a report that its root has refused sent again."""
        self.member.report_dropped(report)

    @property
    def url(self) -> str:
        return self.member.url

    @url.setter
    def url(self, url: str) -> None:
        self.member.url = url

    @property
    def session(self) -> str:
        return self.member.session

    @property
    def end(self) -> EndReason:
        return self.attempt.end

    @property
    def is_root(self) -> bool:
        return self.member.is_root

    @property
    def identity(self) -> RankIdentity:
        return self.attempt.identity

    @property
    def created_unix_ns(self) -> frozenset[int]:
        return frozenset(ring.identity.created_unix_ns for ring in self._rings)

    @property
    def nodes(self) -> tuple[KnownNode, ...]:
        return self.member.nodes

    @property
    def urgent(self) -> bool:
        return self.member.urgent

    def next_report(self) -> NodeReport | None:
        return self.member.next_report()

    @property
    def longest_pace_seconds(self) -> float:
        return self.member.longest_pace_seconds

    def follow_pace(self, pace_seconds: float) -> None:
        self.member.follow_pace(pace_seconds)

    def receive(self, report: NodeReport) -> Receipt:
        return self.member.receive(report)

    def acknowledge(self, receipt: Receipt) -> None:
        self.member.acknowledge(receipt)
