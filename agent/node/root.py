"""The root's side of a run: rows of all nodes come in, steps and layers of the run come out."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from mp_agent.errors import ReportError
from mp_agent.node.assemble import Assembler
from mp_agent.node.layer_names import LayerNames
from mp_agent.node.liveness import run_end
from mp_agent.node.merge import StepMerge, Terms
from mp_agent.node.merge_layers import LayerMerge, LayerTerms, MergedLayers
from mp_agent.node.shares import AssumedShares, Roster, make_roster
from mp_agent.records.merged import MergedStep
from mp_agent.records.rows import KnownNode, NodeReport, NodeShare, RankStatus, Receipt
from mp_agent.records.steps import EndReason

AHEAD_AT_MOST = 1024
"""Steps by which a node can be ahead of the root. Ranks of an attempt train together: rows that
are further ahead are of another attempt."""

_STRANGERS = -1
"""Stands for the nodes that are not known yet, where a step is waited for."""
_OPEN_RANKS_MAX = 2**22
"""Ranks times steps that are held open at once, so that memory stays bounded."""
_OPEN_STEPS_MIN = 64


@dataclass(frozen=True, slots=True, eq=False)
class MergedTable:
    """The merged layers of a sampled step."""

    sequence: int
    layers: MergedLayers


@dataclass(slots=True)
class _Node:
    """What the root knows of a node."""

    report: NodeReport
    """The last one."""
    own: bool
    position: int
    layers_position: int
    """How far its rows were taken, or need not be."""
    heard_seconds: float
    fresh: bool = True
    """Whether it has yet to be learned from."""
    end: EndReason = EndReason.RUNNING
    held: frozenset[NodeShare] = frozenset()
    holdings: list[frozenset[NodeShare]] = field(default_factory=list)

    @property
    def started(self) -> int:
        """The last step that a rank of it began."""
        return max((status.started_sequence for status in self.report.statuses), default=0)


@dataclass(slots=True)
class _OpenStep:
    merge: StepMerge
    held: set[NodeShare] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)


class RootMerge:
    """Puts the rows of an attempt's nodes together; yields each step once and in order."""

    def __init__(
        self,
        world_size: int,
        *,
        deadline_seconds: float,
        grace_seconds: float,
        closed_sequence: int = 0,
        closed_layers_sequence: int = 0,
        assumed: Mapping[str, bool] | None = None,
        retired_sessions: Collection[str] = (),
    ) -> None:
        """Begin after what is closed already.

        deadline_seconds: how long a step waits for nodes; a node that is silent for so long is
        taken for gone. grace_seconds: how long the end waits for nodes that never reported.
        """
        self.assumed = AssumedShares(assumed)
        self.late = 0
        """Rows of ranks that came after their step was closed."""
        self.settled = (closed_sequence, closed_layers_sequence)
        """Steps and tables up to these are in the ledger."""
        self._world_size = world_size
        self._deadline_seconds = deadline_seconds
        self._grace_seconds = grace_seconds
        self._retired_sessions = frozenset(retired_sessions)
        self._base = (closed_sequence, closed_layers_sequence)
        open_at_most = max(_OPEN_STEPS_MIN, _OPEN_RANKS_MAX // world_size)
        self.steps: Assembler[None] = Assembler(
            deadline_seconds, closed_sequence, pending_at_most=open_at_most
        )
        self.tables: Assembler[None] = Assembler(deadline_seconds, closed_layers_sequence)
        self._nodes: dict[int, _Node] = {}
        self._open: dict[int, _OpenStep] = {}
        self._open_tables: dict[int, LayerMerge] = {}
        self._names = LayerNames()
        self._homes: dict[int, int] = {}
        """The node of each rank."""
        self._shares: dict[NodeShare, NodeShare] = {}
        """One object for equal shares of all nodes."""
        self._roster: tuple[tuple[set[NodeShare], int], Roster] | None = None
        self._own_ended_seconds: float | None = None

    @property
    def sessions(self) -> frozenset[str]:
        """The sessions of the nodes that belong to this attempt."""
        return frozenset(node.report.session for node in self._nodes.values())

    def receive(
        self,
        report: NodeReport,
        now_seconds: float,
        time_unix_seconds: float,
        *,
        own: bool = False,
    ) -> Receipt:
        """Take a node's report in, at a time on the root's own clocks.

        What was taken before is not taken again. Rows are refused, to be sent again, where rows
        before them are missing that can still be had. Raises ReportError when the report
        contradicts what is known of the run.
        """
        self._check(report, own=own)
        node = self._nodes.get(report.node_rank)
        if node is None or node.report.session != report.session:
            if report.session in self._retired_sessions:
                return turned_away(report, taken=True)
            if node is not None and not own and not self._silent(node, now_seconds):
                return turned_away(report, taken=False)
            node = _Node(report, own, *self._base, now_seconds)
            self._nodes[report.node_rank] = node
        self._learn(node, report, now_seconds)
        if self._refused(node, report):
            return self._receipt(node, taken=False)
        self._take_steps(node, report, now_seconds, time_unix_seconds)
        self._take_tables(node, report, now_seconds)
        return self._receipt(node, taken=True)

    def close_ready(self, now_seconds: float) -> Iterator[MergedStep | MergedTable]:
        """Yield what is complete or overdue; a step always before its layers."""
        awaited = self._awaited_nodes()
        for sequence, _ in self.steps.close_ready(awaited, now_seconds):
            yield self._merge_step(sequence)
        closed = self.steps.closed_sequence
        for sequence, _ in self.tables.close_ready(awaited, now_seconds, up_to=closed):
            yield self._merge_table(sequence)

    def close_all(self) -> Iterator[MergedStep | MergedTable]:
        """Yield what is still open: nothing more will come."""
        for sequence, _ in self.steps.close_all():
            yield self._merge_step(sequence)
        for sequence, _ in self.tables.close_all():
            yield self._merge_table(sequence)

    def end(self, now_seconds: float) -> EndReason:
        """Return how the attempt ended; RUNNING while a rank of any node goes on.

        Ranks of a node that fell silent count as ended, nobody knows how. Nodes that never
        reported are waited for during a grace once this node's own ranks have ended.
        """
        reason = run_end([self._node_end(node, now_seconds) for node in self._nodes.values()])
        if reason is EndReason.RUNNING or not self._strangers_left():
            self._own_ended_seconds = None
            return reason
        if self._own_ended_seconds is None:
            self._own_ended_seconds = now_seconds
        waited_seconds = now_seconds - self._own_ended_seconds
        return reason if waited_seconds >= self._grace_seconds else EndReason.RUNNING

    def nodes(self, now_seconds: float) -> tuple[KnownNode, ...]:
        """Return the nodes that have reported, by node rank."""
        return tuple(
            KnownNode(
                node_rank=number,
                host=node.report.host,
                url=node.report.url,
                ranks=tuple(status.rank for status in node.report.statuses),
                active=self._node_end(node, now_seconds) is EndReason.RUNNING,
                silent_seconds=0.0 if node.own else max(now_seconds - node.heard_seconds, 0.0),
            )
            for number, node in sorted(self._nodes.items())
        )

    def running(self, now_seconds: float) -> list[RankStatus]:
        """Return where the ranks stand that go on, of nodes that are heard of."""
        return [s for s in self.statuses(now_seconds) if s.end is EndReason.RUNNING]

    def statuses(self, now_seconds: float) -> list[RankStatus]:
        """Return where the ranks stand; of a node that fell silent they ended, unknown how."""
        found: list[RankStatus] = []
        for node in self._nodes.values():
            if self._silent(node, now_seconds):
                found.extend(map(_given_up, node.report.statuses))
            else:
                found.extend(node.report.statuses)
        return found

    def _check(self, report: NodeReport, *, own: bool) -> None:
        number = report.node_rank
        if report.world_size != self._world_size:
            raise ReportError(
                f"node {number} is of a world of {report.world_size}, not {self._world_size}, ranks"
            )
        known = self._nodes.get(number)
        if known is not None and known.own is not own:
            raise ReportError(f"two node agents say that they are node {number}")
        for rank in report.expected_ranks:
            if self._homes.get(rank, number) != number:
                raise ReportError(f"rank {rank} is on node {self._homes[rank]}, not on {number}")

    def _learn(self, node: _Node, report: NodeReport, now_seconds: float) -> None:
        """Take in what a report says beside its rows."""
        node.heard_seconds = now_seconds
        self._homes.update(dict.fromkeys(report.expected_ranks, report.node_rank))
        node.end = run_end([status.end for status in report.statuses])
        before = node.report
        if node.fresh or (before.shares, before.held, before.holdings) != (
            report.shares,
            report.held,
            report.holdings,
        ):
            shares = [self._shares.setdefault(share, share) for share in report.shares]
            node.held, *node.holdings = (
                frozenset(shares[i] for i in held) for held in (report.held, *report.holdings)
            )
        node.fresh = False
        node.report = replace(report, steps=(), layers=(), layouts=())

    def _refused(self, node: _Node, report: NodeReport) -> bool:
        """Return whether rows that can be had are missing before these, or these are not ours."""
        known = max(node.position, self.steps.closed_sequence)
        layers_known = max(node.layers_position, self.tables.closed_sequence)
        gap = report.oldest < report.after > known
        layers_gap = report.layers_oldest < report.layers_after > layers_known
        own = max((max(n.started, n.position) for n in self._nodes.values() if n.own), default=0)
        limit = max(own, self.steps.closed_sequence) + AHEAD_AT_MOST
        ahead = bool(report.steps) and report.steps[-1].sequence > limit
        return not node.own and (gap or layers_gap or ahead)

    def _take_steps(
        self, node: _Node, report: NodeReport, now_seconds: float, time_unix_seconds: float
    ) -> None:
        terms = Terms(report.step_columns, report.gradient_columns, report.shares)
        arrived_unix_seconds = None if node.own else time_unix_seconds
        for step in report.steps:
            if step.sequence <= node.position:
                continue
            if step.sequence <= self.steps.closed_sequence:
                self.late += len(step.ranks)
                continue
            self.steps.add(report.node_rank, step.sequence, None, now_seconds)
            entry = self._open.get(step.sequence)
            if entry is None:
                entry = _OpenStep(StepMerge(step.sequence, self._world_size))
                self._open[step.sequence] = entry
            entry.merge.add(step, terms, arrived_unix_seconds=arrived_unix_seconds)
            entry.held |= node.holdings[step.holding]
            entry.nodes.add(report.node_rank)
        node.position = max(node.position, report.position)
        self.steps.advance(report.node_rank, node.position)

    def _take_tables(self, node: _Node, report: NodeReport, now_seconds: float) -> None:
        terms = LayerTerms(report.gradient_columns, report.shares, report.layouts)
        for table in report.layers:
            if max(node.layers_position, self.tables.closed_sequence) < table.sequence:
                self.tables.add(report.node_rank, table.sequence, None, now_seconds)
                entry = self._open_tables.setdefault(table.sequence, LayerMerge(self._world_size))
                entry.add(table, terms)
        node.layers_position = max(node.layers_position, report.layers_position)
        self.tables.advance(report.node_rank, node.layers_position)

    def _receipt(self, node: _Node, *, taken: bool) -> Receipt:
        return Receipt(
            session=node.report.session,
            taken=taken,
            position=max(node.position, self.steps.closed_sequence),
            layers_position=max(node.layers_position, self.tables.closed_sequence),
            settled=self.settled[0],
            layers_settled=self.settled[1],
        )

    def _merge_step(self, sequence: int) -> MergedStep:
        entry = self._open.pop(sequence)
        for number, node in self._nodes.items():
            if number not in entry.nodes:
                entry.held |= node.held
        return entry.merge.merged(self._make_roster(entry.held), self.assumed)

    def _merge_table(self, sequence: int) -> MergedTable:
        held: set[NodeShare] = set()
        held.update(*(node.held for node in self._nodes.values()))
        merge = self._open_tables.pop(sequence)
        layers = merge.merged(self._make_roster(held), self.assumed, self._names)
        return MergedTable(sequence, layers)

    def _make_roster(self, held: set[NodeShare]) -> Roster:
        ranks_known = sum(len(node.report.known_ranks) for node in self._nodes.values())
        if self._roster is None or self._roster[0] != (held, ranks_known):
            roster = make_roster(held, ranks_known=ranks_known, world_size=self._world_size)
            self._roster = ((held, ranks_known), roster)
        return self._roster[1]

    def _awaited_nodes(self) -> set[int]:
        """Return the nodes from which more can come, those that are not known yet included."""
        awaited = {number for number, node in self._nodes.items() if not node.report.final}
        return awaited | {_STRANGERS} if self._strangers_left() else awaited

    def _strangers_left(self) -> bool:
        return len(self._homes) < self._world_size

    def _node_end(self, node: _Node, now_seconds: float) -> EndReason:
        if node.end is not EndReason.RUNNING or not self._silent(node, now_seconds):
            return node.end
        ends = [status.end for status in node.report.statuses]
        return run_end([EndReason.UNKNOWN if e is EndReason.RUNNING else e for e in ends])

    def _silent(self, node: _Node, now_seconds: float) -> bool:
        return not node.own and now_seconds - node.heard_seconds >= self._deadline_seconds


def _given_up(status: RankStatus) -> RankStatus:
    """Return the status of a rank that is not heard of any more."""
    running = status.end is EndReason.RUNNING
    return replace(status, end=EndReason.UNKNOWN) if running else status


def turned_away(report: NodeReport, *, taken: bool) -> Receipt:
    """Return the answer to a report of another attempt.

    taken: of one that is over; else of one that this node has yet to see, to be sent again.
    """
    return Receipt(
        session=report.session,
        taken=taken,
        position=report.position if taken else report.after,
        layers_position=report.layers_position if taken else report.layers_after,
        settled=0,
        layers_settled=0,
    )
