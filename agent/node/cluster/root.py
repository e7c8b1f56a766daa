"""Merges the rows of all nodes, at the root, into steps and layers of the run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from msgspec.structs import replace

from mp_agent.errors import FailureLog
from mp_agent.node.cluster.nodes import Node, NodeRegistry
from mp_agent.node.cluster.reports import STEPS_KEPT, row_bytes
from mp_agent.node.collect.attempt import Assembler
from mp_agent.node.merge.coverage import AssumedShares, ExpectedShares, make_expected_shares
from mp_agent.node.merge.node_layers import LayerNames
from mp_agent.node.merge.run_layers import LayerMerge, MergedLayers, ReportLayerColumns
from mp_agent.node.merge.run_steps import ReportColumns, StepMerge, completed
from mp_agent.node.merge.step_blocks import BlockRows, Forms, NodeForm
from mp_agent.records.columns import FAMILIES, ColumnFamily
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.records.merged import MergedStep
from mp_agent.records.node_report import NodeReport, NodeShare, NodeStep, Receipt
from mp_agent.records.schema import FamilyColumns
from mp_agent.records.steps import EndReason, StepForm

AHEAD_AT_MOST = 1024
"""Steps by which a node can be ahead of the root. Ranks of an attempt train together: rows further
ahead belong to another attempt."""
FIRST_REPORT_SECONDS = 60.0
"""Time that steps stay open beyond their deadline for nodes that have never reported: their agents
may be starting, and query the job's store for the root for half a minute. They keep their rows
meanwhile, so that a slow start loses nothing."""

_OBJECT_BYTES = 1024
"""What the merge of a row takes beyond its numbers."""
_OPEN_RANKS_MAX = 2**24
"""Bound on ranks times open steps, and thereby on memory: each takes some 40 bytes."""
_OPEN_STEPS_MIN = 64
_OPEN_STEPS_SPARE = 3
"""Of the steps that may be open, a push interval takes at most one in so many."""
_TEMPO_SECONDS = 10.0
_SLOWER = 1.05
"""Factor, per `_TEMPO_SECONDS`, by which steps are taken for slower again after faster ones."""
_REDUCTION = -2
"""Placeholder for what the ranks themselves reduce, where a step is awaited."""


@dataclass(frozen=True, slots=True, eq=False)
class MergedTable:
    """The merged layers of a sampled step, by family."""

    sequence: int
    families: Mapping[str, MergedLayers]


@dataclass(slots=True)
class _OpenStep:
    merge: StepMerge
    held: set[NodeShare] = field(default_factory=set)


_ColumnNames = tuple[tuple[str, ...], tuple[FamilyColumns, ...]]
_COLUMN_NAMES_MAX = 64
"""Different ones that are shared; a node that changes its own all the time must not fill memory."""


class RootMerger:
    """Merges the rows of an attempt's nodes; yields each step once and in order."""

    def __init__(
        self,
        world_size: int,
        *,
        deadline_seconds: float,
        grace_seconds: float,
        closed_sequence: int = 0,
        closed_layers_sequence: int = 0,
        assumed: Mapping[str, list[list[int]]] | None = None,
        retired_sessions: Collection[str] = (),
        families: Sequence[ColumnFamily] = FAMILIES,
    ) -> None:
        """Start after what is already closed.

        deadline_seconds: how long a step waits for nodes; a node that is silent for that long
        counts as gone. grace_seconds: how long the end waits for nodes that never reported.
        """
        self.assumed = AssumedShares(assumed)
        self.late = 0
        """Rows of ranks that arrived after their step was closed, or that could not be merged."""
        self._failures = FailureLog()
        self.settled = (closed_sequence, closed_layers_sequence)
        """Steps and tables up to these are in the ledger."""
        self.nodes = NodeRegistry(world_size, silence_seconds=deadline_seconds)
        self._world_size = world_size
        self._families = families
        self._grace_seconds = grace_seconds
        self._retired_sessions = frozenset(retired_sessions)
        self._retired_heard: dict[str, float] = {}
        """When each of them was first heard of in this attempt."""
        self._base = (closed_sequence, closed_layers_sequence)
        open_at_most = max(_OPEN_STEPS_MIN, _OPEN_RANKS_MAX // world_size)
        self.steps: Assembler[None] = Assembler(
            deadline_seconds, closed_sequence, pending_at_most=open_at_most
        )
        self.tables: Assembler[None] = Assembler(deadline_seconds, closed_layers_sequence)
        self._open: dict[int, _OpenStep] = {}
        self._open_tables: dict[int, LayerMerge] = {}
        self._reduced: dict[int, GlobalStatistics] = {}
        """What the ranks themselves have reduced of steps that are not closed."""
        self._ranks_reduce = False
        self._names = LayerNames()
        self._forms = Forms(families)
        self._column_names: dict[_ColumnNames, _ColumnNames] = {}
        """Of step columns and families: nearly all nodes have the same."""
        self._expected_shares: tuple[tuple[set[NodeShare], int], ExpectedShares] | None = None
        self._begun_seconds: float | None = None
        self._own_ended_seconds: float | None = None
        self._tempo: tuple[float, int] | None = None
        """When the root's own ranks had made which step, some time ago."""
        self._step_seconds = inf
        """Of the fastest steps lately."""

    @property
    def longest_pace_seconds(self) -> float:
        """Longest time between a node's pushes in which the open steps do not become too many."""
        return self._step_seconds * self.steps.pending_at_most / _OPEN_STEPS_SPARE

    def wait(self, deadline_seconds: float, grace_seconds: float) -> None:
        """Wait so long from now on, as in the constructor; also for what is open already."""
        self.steps.deadline_seconds = self.tables.deadline_seconds = deadline_seconds
        self.nodes.silence_seconds = deadline_seconds
        self._grace_seconds = grace_seconds

    def postpone(self, seconds: float) -> None:
        """Wait so much longer for the nodes, whose reports this agent did not get meanwhile."""
        self.steps.postpone(seconds)
        self.tables.postpone(seconds)
        self.nodes.postpone(seconds)

    def receive(
        self,
        report: NodeReport,
        now_seconds: float,
        time_unix_seconds: float,
        *,
        own: bool = False,
    ) -> Receipt:
        """Add a node's report; times are those of the root's own clocks.

        Rows that were added before are ignored. Rows are refused, to be sent again, if earlier
        rows are missing that the node still has. Raises ReportError when the report contradicts
        what is known of the run.
        """
        self.nodes.check(report, now_seconds, own=own)
        node = self.nodes.get(report.node_rank)
        if node is None or node.report.session != report.session:
            if self._is_over(report.session, now_seconds):
                return refusal(report, accepted=True)
            if node is not None and not own and not self.nodes.silent(node, now_seconds):
                return refusal(report, accepted=False)
            node = Node(report, own, *self._base, now_seconds)
            self.nodes.put(node)
        if self._begun_seconds is None:
            self._begun_seconds = now_seconds
        refused = self._refused(node, report)
        final = report.final and not refused
        self.nodes.update(node, replace(report, final=final), now_seconds)
        if refused:
            return self._receipt(node, accepted=False)
        self._add_steps(node, report, now_seconds, time_unix_seconds)
        self._add_tables(node, report, now_seconds)
        if own:
            self.nodes.note_made(node.position, now_seconds)
            self._note_tempo(node.position, now_seconds)
        return self._receipt(node, accepted=True)

    def note_reduced(self, found: GlobalStatistics, now_seconds: float) -> None:
        """Use what the ranks have reduced of a step if rows of it are missing when it is closed.

        From the first time on, steps of which nodes are missing wait for it until the deadline.
        """
        self._ranks_reduce = True
        if found.sequence in self._open:
            self._reduced[found.sequence] = found
            self.steps.add(_REDUCTION, found.sequence, None, now_seconds)
        self.steps.advance(_REDUCTION, found.sequence)

    def close_ready(self, now_seconds: float) -> Iterator[MergedStep | MergedTable]:
        """Yield what is complete or overdue; a step always before its layers."""
        awaited, ignore_deadline = self.nodes.awaited, self._awaits_unreported(now_seconds)
        reduction = self._ranks_reduce and self.nodes.has_missing(now_seconds)
        for sequence, nodes in self.steps.close_ready(
            awaited | {_REDUCTION} if reduction else awaited,
            now_seconds,
            ignore_deadline=ignore_deadline,
        ):
            yield from self._step(sequence, nodes)
        closed = self.steps.closed_sequence
        for sequence, nodes in self.tables.close_ready(
            awaited, now_seconds, up_to=closed, ignore_deadline=ignore_deadline
        ):
            yield from self._table(sequence, nodes)

    def close_all(self) -> Iterator[MergedStep | MergedTable]:
        """Yield everything that is still open: no more rows will arrive."""
        for sequence, nodes in self.steps.close_all():
            yield from self._step(sequence, nodes)
        for sequence, nodes in self.tables.close_all():
            yield from self._table(sequence, nodes)

    def end(self, now_seconds: float) -> EndReason:
        """Return how the attempt ended; RUNNING while a rank of any node runs, or rows are to come.

        Once all known nodes have ended, those that never reported get a grace period.
        """
        reason = self.nodes.end(now_seconds)
        if reason is EndReason.RUNNING or not self.nodes.has_unreported:
            self._own_ended_seconds = None
            return reason
        if self._own_ended_seconds is None:
            self._own_ended_seconds = now_seconds
        waited_seconds = now_seconds - self._own_ended_seconds
        return reason if waited_seconds >= self._grace_seconds else EndReason.RUNNING

    def _is_over(self, session: str, now_seconds: float) -> bool:
        """Return whether a node's session is of an earlier attempt.

        The root may have met it there because the node began this attempt first. Then its reports
        go on; of one that is over there is at most one, that was long on its way.
        """
        if session not in self._retired_sessions:
            return False
        first_seconds = self._retired_heard.setdefault(session, now_seconds)
        return now_seconds - first_seconds < self.nodes.silence_seconds

    def _note_tempo(self, position: int, now_seconds: float) -> None:
        if self._tempo is None or now_seconds == self._tempo[0]:
            # What was made before the root began comes in several reports.
            self._tempo = (now_seconds, position)
        elapsed_seconds, made = now_seconds - self._tempo[0], position - self._tempo[1]
        if made > 0 and elapsed_seconds >= _TEMPO_SECONDS:
            self._step_seconds = min(elapsed_seconds / made, _SLOWER * self._step_seconds)
            self._tempo = (now_seconds, position)

    def _awaits_unreported(self, now_seconds: float) -> bool:
        """Return whether overdue steps stay open for nodes that never reported.

        Those nodes keep a bounded number of rows: waiting for more would be useless.
        """
        if self._begun_seconds is None or not self.nodes.has_unreported:
            return False
        early = now_seconds - self._begun_seconds < FIRST_REPORT_SECONDS
        return early and len(self._open) <= STEPS_KEPT

    def _refused(self, node: Node, report: NodeReport) -> bool:
        """Return whether earlier rows are missing that the node still has, or these are foreign."""
        known = max(node.position, self.steps.closed_sequence)
        layers_known = max(node.layers_position, self.tables.closed_sequence)
        gap = report.oldest < report.after > known
        layers_gap = report.layers_oldest < report.layers_after > layers_known
        limit = max(self.nodes.newest_here, self.steps.closed_sequence) + AHEAD_AT_MOST
        newest = max([report.newest, *(table.sequence for table in report.layers[-1:])])
        return not node.own and (gap or layers_gap or newest > limit)

    def _add_steps(
        self, node: Node, report: NodeReport, now_seconds: float, time_unix_seconds: float
    ) -> None:
        columns = ReportColumns(report.step_columns, report.families, report.shares)
        arrived_unix_seconds = None if node.own else time_unix_seconds
        node.steps.close(self.steps.closed_sequence)
        for step in report.steps:
            objects = len(step.rows) + len(step.samples) + len(step.batches)
            size = row_bytes(step) + _OBJECT_BYTES * objects
            entries = self._entered(node, (step.sequence,), step, size, now_seconds)
            for _, merge in entries:
                merge.add(step, columns, arrived_unix_seconds=arrived_unix_seconds)
        for block in report.blocks:
            rows = BlockRows.of(self._form(node, block.form, columns), block)
            size = (len(block.values) + len(block.digests)) // len(block.sequences)
            for place, merge in self._entered(node, block.sequences, block.form, size, now_seconds):
                merge.add_block(rows, place, arrived_unix_seconds=arrived_unix_seconds)
        node.position = max(node.position, report.position)
        self.steps.advance(report.node_rank, node.position)

    def _entered(
        self,
        node: Node,
        sequences: Sequence[int],
        of: NodeStep | StepForm,
        size_bytes: int,
        now_seconds: float,
    ) -> Iterator[tuple[int, StepMerge]]:
        """Yield the steps that a node's rows are to enter, each with the place of the row.

        Not those that have the row, or are closed, or would be too much. size_bytes: of each.
        """
        number = node.report.node_rank
        for place, sequence in enumerate(sequences):
            if sequence <= node.position:
                continue
            closed = sequence <= self.steps.closed_sequence
            if closed or not (node.own or node.steps.admits(sequence, size_bytes)):
                self.late += len(of.ranks)
                continue
            self.steps.add(number, sequence, None, now_seconds)
            entry = self._open.get(sequence)
            if entry is None:
                entry = _OpenStep(StepMerge(sequence, self._world_size, self._families))
                self._open[sequence] = entry
            # Not before: of a report that comes again late, the node's holdings are other ones.
            entry.held |= node.holdings[of.holding]
            yield place, entry.merge

    def _form(self, node: Node, form: StepForm, terms: ReportColumns) -> NodeForm:
        """Return a form as this agent reads it; most reports of a node have the same one."""
        known = node.form
        if known is None or known[0] != terms or known[1].form != form:
            number = node.report.node_rank
            read = self._forms.read(number, form, terms.step_columns, terms.families, terms.shares)
            names = (terms.step_columns, tuple(terms.families))
            if len(self._column_names) >= _COLUMN_NAMES_MAX:
                self._column_names.clear()
            step_columns, families = self._column_names.setdefault(names, names)
            kept = ReportColumns(step_columns, families, node.report.shares)
            known = node.form = (kept, read)
        return known[1]

    def _add_tables(self, node: Node, report: NodeReport, now_seconds: float) -> None:
        columns = ReportLayerColumns(report.families, report.shares, report.layouts)
        closed = self.tables.closed_sequence
        node.tables.close(closed)
        for table in report.layers:
            if table.sequence <= max(node.layers_position, closed):
                continue
            if node.own or node.tables.admits(table.sequence, row_bytes(table)):
                self.tables.add(report.node_rank, table.sequence, None, now_seconds)
                entry = self._open_tables.get(table.sequence)
                if entry is None:
                    entry = LayerMerge(self._world_size, self._families)
                    self._open_tables[table.sequence] = entry
                entry.add(table, columns)
            else:
                self.late += len(node.ranks)
        node.layers_position = max(node.layers_position, report.layers_position)
        self.tables.advance(report.node_rank, node.layers_position)

    def _receipt(self, node: Node, *, accepted: bool) -> Receipt:
        return Receipt(
            session=node.report.session,
            accepted=accepted,
            position=max(node.position, self.steps.closed_sequence),
            layers_position=max(node.layers_position, self.tables.closed_sequence),
            settled=self.settled[0],
            layers_settled=self.settled[1],
        )

    def _step(self, sequence: int, nodes: Collection[int]) -> Iterator[MergedStep]:
        """Yield the step of all nodes; rows that cannot be merged are lost, and counted."""
        merge = partial(self._merge_step, sequence, nodes)
        merged = self._failures.contain(merge, "step %d cannot be merged", sequence)
        if merged is None:
            self._count_lost(nodes)
        else:
            yield merged

    def _table(self, sequence: int, nodes: Collection[int]) -> Iterator[MergedTable]:
        """Yield the layers of all nodes, as `_step`."""
        merge = partial(self._merge_table, sequence)
        merged = self._failures.contain(merge, "layers of step %d cannot be merged", sequence)
        if merged is None:
            self._count_lost(nodes)
        else:
            yield merged

    def _count_lost(self, nodes: Collection[int]) -> None:
        found = map(self.nodes.get, nodes)
        self.late += sum(len(node.report.statuses) for node in found if node is not None)

    def _merge_step(self, sequence: int, nodes: Collection[int]) -> MergedStep:
        entry = self._open.pop(sequence)
        held = entry.held | self.nodes.held(without=nodes)
        table = self._open_tables.get(sequence)
        merged = entry.merge.merged(
            self._shares_expected_of(held), self.assumed, None if table is None else table.copies
        )
        reduced = self._reduced.pop(sequence, None)
        for earlier in [number for number in self._reduced if number < sequence]:
            del self._reduced[earlier]
        return merged if reduced is None else completed(merged, reduced)

    def _merge_table(self, sequence: int) -> MergedTable:
        merge = self._open_tables.pop(sequence)
        families = merge.merged(
            self._shares_expected_of(self.nodes.held()), self.assumed, self._names
        )
        return MergedTable(sequence, families)

    def _shares_expected_of(self, held: set[NodeShare]) -> ExpectedShares:
        ranks_known = self.nodes.ranks_known
        if self._expected_shares is None or self._expected_shares[0] != (held, ranks_known):
            expected_shares = make_expected_shares(
                held, ranks_known=ranks_known, world_size=self._world_size
            )
            self._expected_shares = ((held, ranks_known), expected_shares)
        return self._expected_shares[1]


def refusal(report: NodeReport, *, accepted: bool) -> Receipt:
    """Return the answer to a report of another attempt.

    accepted: of one that is over; else of one that this node has not seen yet, to be sent again.
    """
    return Receipt(
        session=report.session,
        accepted=accepted,
        position=report.position if accepted else report.after,
        layers_position=report.layers_position if accepted else report.layers_after,
        settled=0,
        layers_settled=0,
    )
