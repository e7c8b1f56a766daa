"""One node's part in an attempt over all nodes: it reports rows or, as the root, merges them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from math import inf

from mp_agent.node.cluster.reports import ReportBuilder, ReportTimes, report_header
from mp_agent.node.cluster.root import MergedTable, RootMerger, refusal
from mp_agent.node.collect.attempt import LocalAttempt, LocalStep
from mp_agent.node.collect.rank_source import furthest_behind
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.records.merged import MergedStep
from mp_agent.records.node_report import (
    KnownNode,
    LayerBlock,
    NodeLayers,
    NodeReport,
    RankStatus,
    Receipt,
)
from mp_agent.records.reduction import reduced_statistics
from mp_agent.records.steps import EndReason, Phase
from mp_agent.settings import Settings


class ClusterMember:
    """Collects this node's rows, reports them to the root, or merges all nodes' rows at the root.

    `collect` and `merge` are called one after the other, several times a second.
    """

    def __init__(
        self,
        attempt: LocalAttempt,
        settings: Settings,
        *,
        session: str,
        assumed: Mapping[str, list[list[int]]] | None = None,
        retired_sessions: Sequence[str] = (),
    ) -> None:
        """Start where the attempt starts to read; retired_sessions: those of earlier attempts."""
        self.attempt = attempt
        self.session = session
        self.url = ""
        self._settings = settings
        self._base = (attempt.steps.closed_sequence, attempt.tables.closed_sequence)
        self._assumed = dict(assumed or {})
        self.retired_sessions = tuple(retired_sessions)
        """Sessions of earlier attempts, the latest last."""
        self._reports = ReportBuilder(
            attempt.schema_index, position=self._base[0], layers_position=self._base[1]
        )
        self._root: RootMerger | None = None
        self._settled = self._base
        self._reduced: list[GlobalStatistics] = []
        """What rank 0 has written of the ranks' reductions since the last merge."""
        self._end = EndReason.RUNNING
        self._lost_before = 0
        """The most that `lost` has been: rows that come after the end are no longer missing."""
        self._pace_seconds = settings.push_interval_seconds
        self._now_seconds = 0.0
        # Two reports per push interval, so that a push that is a little early is not empty.
        self._times = ReportTimes(settings.push_interval_seconds / 2)

    @property
    def is_root(self) -> bool:
        """Whether this node holds rank 0: it merges what all nodes report."""
        return 0 in self.attempt.sources or 0 in self.attempt.expected_ranks

    @property
    def end(self) -> EndReason:
        """How the attempt ended: at the root on all nodes, elsewhere on this one."""
        return self._end

    @property
    def closed(self) -> tuple[int, int]:
        """(step, layer table) up to which this node never has to read its rings again.

        At the root, what is merged; elsewhere, what the root has in its ledger.
        """
        if self._root is None:
            return self._settled
        return self._root.steps.closed_sequence, self._root.tables.closed_sequence

    @property
    def assumed(self) -> Mapping[str, list[list[int]]]:
        """Sets of ranks that hold copies of plain parameters, by group."""
        return self._root.assumed.copies if self._root else self._assumed

    @property
    def sessions(self) -> frozenset[str]:
        """The sessions of all nodes in this attempt."""
        return self._root.nodes.sessions if self._root else frozenset()

    @property
    def lost(self) -> int:
        """Rows that arrived after their step was closed, or were evicted before they were sent.

        At the end of the attempt also those that have not arrived.
        """
        lost = self._reports.steps.lost + self._reports.tables.lost
        lost += self.missing_rows + (self._root.late if self._root else 0)
        return max(lost, self._lost_before)

    @property
    def missing_rows(self) -> int:
        """Rows of other nodes that the attempt has ended without; 0 before its end."""
        if self._root is None or self._end is EndReason.RUNNING:
            return 0
        return self._root.nodes.missing_rows

    @property
    def urgent(self) -> bool:
        """Whether trouble began on this node since the last report."""
        return self._times.urgent

    @property
    def nodes(self) -> tuple[KnownNode, ...]:
        """The known nodes; on nodes other than the root, this one alone."""
        if self._root is not None:
            return self._root.nodes.described(self._now_seconds)
        identity = self.attempt.identity
        this = KnownNode(
            node_rank=identity.node_rank,
            host=identity.host,
            url=self.url,
            ranks=tuple(sorted(self.attempt.sources)),
            active=self.attempt.end is EndReason.RUNNING,
            silent_seconds=0.0,
        )
        return (this,)

    @property
    def node_count(self) -> int:
        """Number of nodes of the run; an estimate from this node's size until all have reported."""
        if self._root is not None and not self._root.nodes.has_unreported:
            # Several nodes may share a machine, whose agent reports for all of them.
            here = {source.identity.node_rank for source in self.attempt.sources.values()}
            return len(self._root.nodes) - 1 + len(here)
        identity = self.attempt.identity
        return -(-identity.world_size // max(identity.local_world_size, 1))

    @property
    def statuses(self) -> Sequence[RankStatus]:
        """State of the ranks, ended ones included; at the root, of all nodes that have reported."""
        if self._root is None:
            return self.attempt.statuses()
        return self._root.nodes.statuses(self._now_seconds)

    @property
    def phase_name(self) -> str:
        """Phase of the rank that is furthest behind; at the root, among all nodes' ranks."""
        if self._root is None:
            behind = furthest_behind(self.attempt.statuses())
        else:
            behind = self._root.nodes.furthest_behind(self._now_seconds)
        return behind.phase_name if behind else Phase.ENDED.name.lower()

    @property
    def longest_pace_seconds(self) -> float:
        """Longest time between pushes for which the root can keep the steps open."""
        return inf if self._root is None else self._root.longest_pace_seconds

    @property
    def slower_seconds(self) -> float:
        """By how much longer than usual rows of other nodes may take, since pushes are slow."""
        return self._pace_seconds - self._settings.push_interval_seconds

    def follow_pace(self, pace_seconds: float) -> None:
        """At the root, wait for rows of nodes that push this often."""
        self._pace_seconds = pace_seconds
        if self._root is not None:
            self._root.wait(*self._waits_seconds())

    def postpone(self, seconds: float) -> None:
        """At the root, wait so much longer for rows of other nodes."""
        if self._root is not None:
            self._root.postpone(seconds)

    def collect(self, now_seconds: float, *, final: bool = False) -> Iterator[LocalStep]:
        """Read the rings; queue this node's new rows for the root and yield its steps.

        final: the attempt is over; incomplete steps are closed as they are.
        """
        self._now_seconds = now_seconds
        yield from self._queue(self.attempt.poll(now_seconds))
        if final or self.attempt.end is not EndReason.RUNNING:
            yield from self._queue(self.attempt.close_all())
        if self._root is None:
            self._end = self.attempt.end

    def merge(self, *, final: bool = False) -> Iterator[MergedStep | MergedTable]:
        """At the root, yield the run's steps that are complete or overdue; each before its layers.

        Yields nothing on other nodes. final: the attempt is over; incomplete steps are closed.
        """
        if not self.attempt.sources or not self.is_root:
            return
        root = self._root = self._root or self._make_root()
        self._receive_own(root)
        for reduced in self._reduced:
            root.note_reduced(reduced, self._now_seconds)
        self._reduced.clear()
        yield from root.close_ready(self._now_seconds)
        self._end = root.end(self._now_seconds)
        if final and self._end is EndReason.RUNNING:
            self._end = EndReason.UNKNOWN  # a node's last rows have not come, and count as lost
        self._lost_before = self.lost
        if final or self._end is not EndReason.RUNNING:
            yield from root.close_all()

    def next_report(self) -> NodeReport | None:
        """Return what is new since the last call; see `Run.next_report`."""
        if not self.attempt.sources or self.is_root:
            return None
        ends = tuple(source.end for _, source in sorted(self.attempt.sources.items()))
        if not self._reports.overdue and not self._times.due(self._now_seconds, ends):
            return None
        self._times.reported(self._now_seconds, ends)
        return self._report()

    def receive(self, report: NodeReport) -> Receipt:
        """Merge another node's report; see `Run.receive`."""
        if self._root is None:
            return refusal(report, accepted=False)
        return self._root.receive(report, self._now_seconds, time.time())

    def report_dropped(self, report: NodeReport, *, too_large: bool = False) -> None:
        """Report the rows of a report again that the root could not read."""
        if report.session != self.session:
            return
        self._reports.resend(report)
        if not too_large or self._reports.make_smaller(report):
            self._times.report_at_once()

    def acknowledge(self, receipt: Receipt) -> bool:
        """Process the root's answer; return whether more is settled than before."""
        if receipt.session != self.session:
            return False
        self._times.answered(self._now_seconds)
        settled = self._reports.acknowledge(receipt)
        before = self._settled
        self._settled = (max(before[0], settled[0]), max(before[1], settled[1]))
        return self._settled != before

    def committed(self, closed: tuple[int, int]) -> None:
        """Record that steps and tables up to these are in the ledger."""
        if self._root is not None:
            self._root.settled = closed

    def _queue(self, rows: Iterator[LocalStep | NodeLayers]) -> Iterator[LocalStep]:
        for row in rows:
            if isinstance(row, LocalStep):
                self._reports.steps.add(row.row)
                self._times.note_step(row.row, self.attempt.schema_index.families)
                if (reduced := reduced_statistics(row.ranks.get(0, {}))) is not None:
                    self._reduced.append(reduced)
                yield row
            else:
                self._queue_table(row)
        self._reports.tables.advance(self.attempt.layers_position)

    def _queue_table(self, table: NodeLayers) -> None:
        if not self.is_root:
            blocks = tuple(block for block in table.blocks if not self._root_has(block))
            table = NodeLayers(sequence=table.sequence, blocks=blocks)
        if table.blocks:
            self._reports.tables.add(table)

    def _root_has(self, block: LayerBlock) -> bool:
        """Return whether every rank of the run holds these layers, and therefore rank 0 does."""
        share = self.attempt.schema_index.shares[block.share]
        if self.attempt.schema_index.families[block.family].compared_only:
            return False
        everywhere = share.replica_count == self.attempt.identity.world_size
        return everywhere and share.shard_count == 1 and not share.assumed

    def _receive_own(self, root: RootMerger) -> None:
        more = True
        while more:
            report = self._report()
            root.receive(report, self._now_seconds, time.time(), own=True)
            self._reports.settle(report.position, report.layers_position)
            more = self._reports.waiting

    def _make_root(self) -> RootMerger:
        deadline_seconds, grace_seconds = self._waits_seconds()
        return RootMerger(
            self.attempt.identity.world_size,
            deadline_seconds=deadline_seconds,
            grace_seconds=grace_seconds,
            closed_sequence=self._base[0],
            closed_layers_sequence=self._base[1],
            assumed=self._assumed,
            retired_sessions=self.retired_sessions,
        )

    def _waits_seconds(self) -> tuple[float, float]:
        """Return the root's deadline for a step, and for nodes that have not reported at the end.

        Rows of other nodes are awaited for two pushes more than the root's own.
        """
        pushes_seconds = 2 * self._pace_seconds
        alone = len(self.attempt.expected_ranks) >= self.attempt.identity.world_size
        return self._settings.merge_deadline_seconds + (0 if alone else pushes_seconds), (
            pushes_seconds
        )

    def _report(self) -> NodeReport:
        header = report_header(self.attempt, session=self.session, url=self.url)
        return self._reports.fill(header, ended=self.attempt.end is not EndReason.RUNNING)
