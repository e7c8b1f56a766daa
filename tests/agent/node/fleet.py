"""Nodes without rings and transport: their rows go through real reports to a real root."""

from collections.abc import Callable, Iterable

from mp_agent.node.cluster.reports import ReportBuilder
from mp_agent.node.cluster.root import MergedTable, RootMerger
from mp_agent.node.merge.node_layers import RankLayers, reduce_layers
from mp_agent.node.merge.node_steps import RankStep, reduce_step
from mp_agent.node.merge.schema_index import SchemaIndex
from mp_agent.records.columns import FAMILIES, ColumnFamily
from mp_agent.records.merged import MergedStep
from mp_agent.records.node_report import NodeReport, RankStatus, Receipt
from mp_agent.records.reports import decode_receipt, decode_report, encode_receipt, encode_report
from mp_agent.records.steps import EndReason, Phase

RankStepOf = Callable[[int, int], RankStep]
"""From rank and sequence number to what the rank wrote."""


class SimNode:
    """One node: what its ranks wrote is given step by step, and survives its agent."""

    def __init__(
        self,
        number: int,
        ranks: Iterable[int],
        world_size: int,
        rank_step: RankStepOf,
        *,
        session: str = "",
        clock_offset_seconds: float = 0.0,
        families: tuple[ColumnFamily, ...] = FAMILIES,
    ) -> None:
        self.number = number
        self.ranks = sorted(ranks)
        self.world_size = world_size
        self.session = session or f"session of node {number}"
        self.clock_offset_seconds = clock_offset_seconds
        self.ends = dict.fromkeys(self.ranks, EndReason.RUNNING)
        self._rank_step = rank_step
        self._families = families
        self._written = 0
        self._settled = 0
        self._missing: dict[int, set[int]] = {}
        self.restart()

    def restart(self) -> None:
        """Restart as the agent after this one, from what is settled."""
        self.schema_index = SchemaIndex(self._families)
        self.reporter = ReportBuilder(self.schema_index, position=self._settled)
        for sequence in range(self._settled + 1, self._written + 1):
            self._add(sequence)

    def restart_at(self, settled: int) -> None:
        """As `restart`, with a ledger that says what is settled."""
        self._settled = settled
        self.restart()

    def write(self, *, without: Iterable[int] = ()) -> None:
        """Write the next step."""
        self._written += 1
        self._missing[self._written] = set(without)
        self._add(self._written)

    def write_layers(self, sequence: int, tables: Iterable[RankLayers]) -> None:
        self.reporter.tables.add(reduce_layers(sequence, list(tables), self.schema_index))
        self.reporter.tables.advance(sequence)

    def end(self, reason: EndReason = EndReason.COMPLETED) -> None:
        self.ends = dict.fromkeys(self.ranks, reason)

    def report(self) -> NodeReport:
        """Return the next report, as it comes out at the other end."""
        plans = [self._rank_step(rank, 1).schema for rank in self.ranks]
        header = NodeReport(
            run="llama",
            session=self.session,
            attempt=0,
            world_size=self.world_size,
            node_rank=self.number,
            host=f"host{self.number}",
            url=f"http://host{self.number}:9464",
            sent_unix_seconds=1_000.0 + self.clock_offset_seconds,
            expected_ranks=tuple(self.ranks),
            known_ranks=tuple(self.ranks),
            statuses=tuple(map(self._status, self.ranks)),
            held=self.schema_index.holdings[self.schema_index.holding(plans)],
            probe_errors=0,
            records_dropped=0,
        )
        ended = EndReason.RUNNING not in self.ends.values()
        return decode_report(encode_report(self.reporter.fill(header, ended=ended)))

    def acknowledge(self, receipt: Receipt) -> None:
        receipt = decode_receipt(encode_receipt(receipt))
        self.reporter.acknowledge(receipt)
        self._settled = max(self._settled, receipt.settled)

    def _add(self, sequence: int) -> None:
        present = [rank for rank in self.ranks if rank not in self._missing[sequence]]
        steps = [self._rank_step(rank, sequence) for rank in present]
        if steps:
            self.reporter.steps.add(reduce_step(steps, self.schema_index))
        self.reporter.steps.advance(sequence)

    def _status(self, rank: int) -> RankStatus:
        return RankStatus(
            rank=rank,
            phase=Phase.FORWARD,
            phase_name="forward",
            started_sequence=self._written,
            committed_sequence=self._written,
            end=self.ends[rank],
        )


def make_root(world_size: int, **options: object) -> RootMerger:
    settings = {"deadline_seconds": 20.0, "grace_seconds": 10.0, **options}
    return RootMerger(world_size, **settings)  # type: ignore[arg-type]


def push(
    root: RootMerger, node: SimNode, now_seconds: float = 0.0, time_unix_seconds: float = 5_000.0
) -> Receipt:
    """Send one report of a node and its receipt back; node 0 is the root's own."""
    own = node.number == 0
    receipt = root.receive(node.report(), now_seconds, time_unix_seconds, own=own)
    node.acknowledge(receipt)
    return receipt


def steps_of(items: Iterable[MergedStep | MergedTable]) -> list[MergedStep]:
    return [item for item in items if isinstance(item, MergedStep)]
