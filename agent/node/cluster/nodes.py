"""The nodes of an attempt as known to its root: their last reports, and the time since."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from msgspec.structs import replace

from mp_agent.errors import ReportError
from mp_agent.node.cluster.reports import WAITING_BYTES_MAX
from mp_agent.node.collect.rank_source import furthest_behind, run_end
from mp_agent.node.merge.run_steps import ReportColumns
from mp_agent.node.merge.step_blocks import NodeForm
from mp_agent.records.node_report import KnownNode, NodeReport, NodeShare, RankStatus
from mp_agent.records.steps import EndReason

OPEN_BYTES_MAX = 4 * WAITING_BYTES_MAX
"""Bound on the steps of another node that wait to be merged, and on its layer tables; it keeps
fewer itself."""
_UNREPORTED = -1
"""Placeholder for all nodes that have not reported yet, where a step is awaited."""
_SHARES_MIN = 1024


@dataclass(slots=True)
class OpenRows:
    """About what the rows of a node take that wait to be merged, in bytes."""

    _sizes: dict[int, int] = field(default_factory=dict)
    """By sequence."""
    _taken: int = 0

    def admits(self, sequence: int, size_bytes: int) -> bool:
        """Add rows, and return True, unless there would be too much."""
        if self._taken + size_bytes > OPEN_BYTES_MAX:
            return False
        self._taken += size_bytes - self._sizes.get(sequence, 0)
        self._sizes[sequence] = size_bytes
        return True

    def close(self, closed_sequence: int) -> None:
        """Forget what was merged."""
        for sequence in [number for number in self._sizes if number <= closed_sequence]:
            self._taken -= self._sizes.pop(sequence)


@dataclass(slots=True)
class Node:
    """State of a node at the root."""

    report: NodeReport
    """The last report, without its rows and the names of their columns."""
    own: bool
    """Whether it is the root's own."""
    position: int
    layers_position: int
    """Sequences up to which its rows were merged, or are not needed."""
    last_report_seconds: float
    ranks: tuple[int, ...] = ()
    """Those with a status. No other node has them, unless this one is silent."""
    made_sequence: int = 0
    """The last step of the root's own ranks while this node still reported: it may have it, too."""
    end: EndReason = EndReason.RUNNING
    behind: RankStatus | None = None
    """The running rank with the least progress."""
    held: frozenset[NodeShare] = frozenset()
    """Shares that its ranks hold now."""
    holdings: list[frozenset[NodeShare]] = field(default_factory=list)
    """Shares that they held at the steps of the last report."""
    form: tuple[ReportColumns, NodeForm] | None = None
    """The last form of its steps, and what that refers to."""
    steps: OpenRows = field(default_factory=OpenRows)
    tables: OpenRows = field(default_factory=OpenRows)

    @property
    def newest(self) -> int:
        """The last step that a rank of it began or delivered."""
        started = (status.started_sequence for status in self.report.statuses)
        return max(self.position, *started, 0)


class NodeRegistry:
    """Tracks nodes by their reports; one that is silent for too long counts as gone."""

    def __init__(self, world_size: int, silence_seconds: float) -> None:
        self.silence_seconds = silence_seconds
        self._world_size = world_size
        self._nodes: dict[int, Node] = {}
        self._own: Node | None = None
        self._homes: dict[int, int] = {}
        """The node that has each rank."""
        self._expected: set[int] = set()
        """The ranks that the nodes have or expect."""
        self._shares: dict[NodeShare, NodeShare] = {}
        """Deduplicates equal shares of all nodes."""
        self._shares_at_most = _SHARES_MIN

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def sessions(self) -> frozenset[str]:
        """The sessions of the nodes that belong to this attempt."""
        return frozenset(node.report.session for node in self._nodes.values())

    @property
    def ranks_known(self) -> int:
        """Number of ranks whose shares are known."""
        return sum(len(node.report.known_ranks) for node in self._nodes.values())

    @property
    def has_unreported(self) -> bool:
        """Whether there are nodes that have not reported yet."""
        return len(self._expected) < self._world_size

    def has_missing(self, now_seconds: float) -> bool:
        """Return whether there are nodes that have not reported, or not for too long."""
        silent = (self.silent(node, now_seconds) for node in self._nodes.values())
        return self.has_unreported or any(silent)

    @property
    def awaited(self) -> set[int]:
        """The nodes from which more can come, those that are not known yet included."""
        awaited = {number for number, node in self._nodes.items() if not node.report.final}
        return awaited | {_UNREPORTED} if self.has_unreported else awaited

    @property
    def newest_here(self) -> int:
        """The last step that a rank of the root's own node began or delivered."""
        return self._own.newest if self._own else 0

    def get(self, number: int) -> Node | None:
        """Return a node, if it has reported."""
        return self._nodes.get(number)

    def put(self, node: Node) -> None:
        """Add a node, or replace the one with its number."""
        number = node.report.node_rank
        if (former := self._nodes.get(number)) is not None:
            node.steps, node.tables = former.steps, former.tables
            self._leave(number, former.ranks)
        # It is the final one once `update` has accepted it as that.
        node.report = replace(node.report, final=False)
        self._nodes[number] = node
        if node.own:
            self._own = node

    def check(self, report: NodeReport, now_seconds: float, *, own: bool) -> None:
        """Raise ReportError when a report contradicts what is known of the run.

        Ranks of a node that is silent may come to another one, and the root's own to it at once.
        """
        number = report.node_rank
        if report.world_size != self._world_size:
            raise ReportError(
                f"node {number} is of a world of {report.world_size}, not {self._world_size}, ranks"
            )
        known = self._nodes.get(number)
        if known is not None and known.own is not own:
            raise ReportError(f"two node agents claim to be node {number}")
        for status in () if own else report.statuses:
            home = self._homes.get(status.rank, number)
            if home != number and not self.silent(self._nodes[home], now_seconds):
                raise ReportError(f"rank {status.rank} is on node {home}, not on {number}")

    def update(self, node: Node, report: NodeReport, now_seconds: float) -> None:
        """Update a node with a report, except for its rows.

        One that is not final, and has no more than the final one, is older: it was repeated.
        """
        node.last_report_seconds = now_seconds
        if node.report.final and not report.final and report.position <= node.position:
            return
        node.end = run_end([status.end for status in report.statuses])
        node.behind = furthest_behind(report.statuses)
        before = node.report
        same = (report.shares, report.held, report.holdings) == (
            before.shares,
            before.held,
            before.holdings,
        )
        if not (same and node.holdings):
            known = self._known(report.shares)
            node.held, *node.holdings = (
                frozenset(known[i] for i in indices) for indices in (report.held, *report.holdings)
            )
        # The names are kept by the form of the steps, and what stays the same is kept once.
        kept = before if same else report
        node.report = replace(
            report,
            step_columns=(),
            families=(),
            shares=kept.shares,
            held=kept.held,
            holdings=kept.holdings,
            steps=(),
            blocks=(),
            layers=(),
            layouts=(),
        )
        ranks = tuple([status.rank for status in report.statuses])
        if ranks != node.ranks:
            self._settle(node, ranks)
        if report.expected_ranks != before.expected_ranks:
            self._count_expected()
        self._expected.update(report.expected_ranks)

    def _settle(self, node: Node, ranks: tuple[int, ...]) -> None:
        """Note which ranks a node has; those of silent nodes among them have left these."""
        number = node.report.node_rank
        for home in {self._homes.get(rank, number) for rank in ranks} - {number}:
            self._leave(home, ranks)
        for rank in node.ranks:
            del self._homes[rank]
        self._homes.update(dict.fromkeys(ranks, number))
        node.ranks = ranks

    def _leave(self, number: int, ranks: Collection[int]) -> None:
        """Take ranks from a node, and forget it once it has none."""
        node, gone = self._nodes[number], set(ranks)
        for rank in gone.intersection(node.ranks):
            del self._homes[rank]
        node.ranks = tuple(rank for rank in node.ranks if rank not in gone)
        if node.ranks:
            report = node.report
            left = tuple(status for status in report.statuses if status.rank not in gone)
            known = tuple(rank for rank in report.known_ranks if rank not in gone)
            expected = tuple(rank for rank in report.expected_ranks if rank not in gone)
            node.report = replace(report, statuses=left, known_ranks=known, expected_ranks=expected)
            node.behind = furthest_behind(left)
        else:
            del self._nodes[number]
        self._count_expected()

    def _count_expected(self) -> None:
        self._expected.clear()
        for node in self._nodes.values():
            self._expected.update(node.report.expected_ranks)

    def _known(self, shares: Sequence[NodeShare]) -> list[NodeShare]:
        """Return the objects that stand for shares; forget those that no node holds any more."""
        if len(self._shares) > self._shares_at_most:
            nodes = self._nodes.values()
            held = (
                own for node in nodes for holding in (node.held, *node.holdings) for own in holding
            )
            self._shares = {share: share for share in held}
            self._shares_at_most = max(_SHARES_MIN, 2 * len(self._shares))
        return [self._shares.setdefault(share, share) for share in shares]

    def note_made(self, sequence: int, now_seconds: float) -> None:
        """Note the last step of the root's own ranks for the nodes that still report."""
        for node in self._nodes.values():
            if not self.silent(node, now_seconds):
                node.made_sequence = sequence

    def held(self, without: Collection[int] = ()) -> set[NodeShare]:
        """Return the shares that all nodes hold now, except for some nodes."""
        held: set[NodeShare] = set()
        held.update(*(node.held for n, node in self._nodes.items() if n not in without))
        return held

    def end(self, now_seconds: float) -> EndReason:
        """Return how the known nodes' ranks ended; RUNNING while one runs, or rows are to come.

        Those of a silent node count as ended for an unknown reason.
        """
        ends = (self._end_of(node, now_seconds) for node in self._nodes.values())
        # One that runs is enough, and is found soon: this is asked several times a second.
        found = list(takewhile(lambda end: end is not EndReason.RUNNING, ends))
        return run_end(found) if len(found) == len(self._nodes) else EndReason.RUNNING

    @property
    def missing_rows(self) -> int:
        """Rows that other nodes have, or may have, and that are not here.

        Of ranks that were running by the last report: what the root's own ranks had done until the
        node fell silent.
        """
        return sum(
            max(_made_sequence(node, status) - node.position, 0)
            for node in self._nodes.values()
            if not node.own
            for status in node.report.statuses
        )

    def described(self, now_seconds: float) -> tuple[KnownNode, ...]:
        """Return the nodes by node rank."""
        return tuple(
            KnownNode(
                node_rank=number,
                host=node.report.host,
                url=node.report.url,
                ranks=tuple(status.rank for status in node.report.statuses),
                active=self._end_of(node, now_seconds) is EndReason.RUNNING,
                silent_seconds=0.0
                if node.own
                else max(now_seconds - node.last_report_seconds, 0.0),
            )
            for number, node in sorted(self._nodes.items())
        )

    def statuses(self, now_seconds: float) -> list[RankStatus]:
        """Return the state of all ranks; those of a silent node count as ended, reason unknown."""
        found: list[RankStatus] = []
        for node in self._nodes.values():
            silent = self.silent(node, now_seconds)
            found.extend(
                map(_presumed_ended, node.report.statuses) if silent else node.report.statuses
            )
        return found

    def furthest_behind(self, now_seconds: float) -> RankStatus | None:
        """Return the status of the running rank with the least progress, None if none runs."""
        # Asked several times a second of up to 10 000 nodes, hence without a call for each.
        heard_seconds = now_seconds - self.silence_seconds
        return furthest_behind(
            [
                node.behind
                for node in self._nodes.values()
                if node.behind is not None
                and (node.last_report_seconds > heard_seconds or node.own)
            ]
        )

    def postpone(self, seconds: float) -> None:
        """Do not count so much time as silence of the nodes."""
        for node in self._nodes.values():
            node.last_report_seconds += seconds

    def silent(self, node: Node, now_seconds: float) -> bool:
        """Return whether a node has not reported for too long."""
        return not node.own and now_seconds - node.last_report_seconds >= self.silence_seconds

    def _end_of(self, node: Node, now_seconds: float) -> EndReason:
        if not self.silent(node, now_seconds):
            # An end is reported with the last rows, or before them: a report may have been lost.
            return node.end if node.report.final else EndReason.RUNNING
        if node.end is not EndReason.RUNNING:
            return node.end
        return run_end([status.end for status in map(_presumed_ended, node.report.statuses)])


def _made_sequence(node: Node, status: RankStatus) -> int:
    """Return the last step of which a rank of another node has a row, as far as it is known."""
    running = status.end is EndReason.RUNNING and not node.report.final
    return max(status.committed_sequence, node.made_sequence if running else 0)


def _presumed_ended(status: RankStatus) -> RankStatus:
    """Return the status of a rank of a silent node."""
    running = status.end is EndReason.RUNNING
    return replace(status, end=EndReason.UNKNOWN) if running else status
