"""Queues this node's rows until the root has them in its ledger, and builds reports of them."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import nan
from typing import Generic, TypeVar

from msgspec.structs import replace

from mp_agent.inputs.files import as_utf8
from mp_agent.node.collect.attempt import LocalAttempt
from mp_agent.node.merge.schema_index import SchemaIndex
from mp_agent.node.merge.step_blocks import in_blocks
from mp_agent.records.columns import ColumnFamily
from mp_agent.records.node_report import (
    TABLES_PER_REPORT,
    LayerBlock,
    Layout,
    NodeLayers,
    NodeReport,
    NodeStep,
    Receipt,
    StepValue,
)
from mp_agent.records.schema import family_columns
from mp_agent.records.steps import STEPS_PER_REPORT, EndReason

_ABSENT = StepValue(count=0, value=nan)

Ends = tuple[EndReason, ...]
"""How the ranks of a node ended, in their order."""


class ReportTimes:
    """Decides when a report is due: after an interval, at once on trouble or a rank's end."""

    def __init__(self, interval_seconds: float) -> None:
        self.urgent = False
        """Whether trouble began on this node since the last report."""
        self._interval_seconds = interval_seconds
        self._troubled = False
        self._reported_seconds: float | None = None
        self._reported_ends: Ends = ()

    def note_step(self, step: NodeStep, families: Sequence[ColumnFamily]) -> None:
        """Note whether a step of the node has non-finite values, which are reported at once."""
        troubled = is_troubled(step, families)
        self.urgent = self.urgent or (troubled and not self._troubled)
        self._troubled = troubled

    def due(self, now_seconds: float, ends: Ends) -> bool:
        """Return whether a report is due."""
        if self._reported_seconds is None or self.urgent or ends != self._reported_ends:
            return True
        return now_seconds - self._reported_seconds >= self._interval_seconds

    def report_at_once(self) -> None:
        """Have a report due: the last one is of no use."""
        self._reported_seconds = None

    def reported(self, now_seconds: float, ends: Ends) -> None:
        """Note that a report was built."""
        self._reported_seconds, self._reported_ends = now_seconds, ends
        self.urgent = False

    def answered(self, now_seconds: float) -> None:
        """Note that the root has answered: the interval counts from there.

        A report that was put off, or waited for a busy root, would be followed by another at once.
        """
        if self._reported_seconds is not None:
            self._reported_seconds = max(now_seconds, self._reported_seconds)


def is_troubled(step: NodeStep, families: Sequence[ColumnFamily]) -> bool:
    """Return whether a rank of the node had a loss or elements that are not finite."""
    if step.nonfinite_loss_ranks:
        return True
    places = [[own.names.index(name) for name in own.nonfinite] for own in families]
    return any(row.columns[place] > 0.0 for row in step.rows for place in places[row.family])


STEPS_KEPT = 2048
TABLES_KEPT = 16
WAITING_BYTES_MAX = 64 * 2**20
"""Bound on the steps that wait for the root, and on the layer tables."""

_EVICTED_MAX = 1 << 16
_NUMBER_BYTES = 32
"""A number of a row, with the reference to it."""

Row = TypeVar("Row", NodeStep, NodeLayers)


@dataclass(slots=True)
class RowQueue(Generic[Row]):
    """Rows in ascending order that may have to be sent, or sent again.

    Keeps at most `limit` rows and about `bytes_max`; beyond that the oldest are lost, but never the
    newest.
    """

    limit: int
    position: int
    """No row up to this sequence will be added."""
    popped: int
    """Rows up to this sequence were returned by `pop`."""
    oldest: int
    """Rows up to this sequence are no longer kept."""
    overdue: bool = False
    """Whether there are rows that an earlier `pop` could have returned."""
    lost: int = 0
    """Rows that were evicted before they were sent, or before they were asked for again."""
    bytes_max: int = WAITING_BYTES_MAX
    size_bytes: int = 0
    """About what the rows take."""
    rows: dict[int, Row] = field(default_factory=dict)
    evicted: deque[int] = field(default_factory=lambda: deque(maxlen=_EVICTED_MAX))
    """Rows that were sent, and evicted before they were settled."""

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows[row.sequence] = row
        self.size_bytes += row_bytes(row)
        self.position = max(self.position, row.sequence)
        while len(self.rows) > 1 and (
            len(self.rows) > self.limit or self.size_bytes > self.bytes_max
        ):
            self.oldest = next(iter(self.rows))
            if self.oldest > self.popped:
                self.lost += 1
            else:
                self.evicted.append(self.oldest)
            self._drop(self.oldest)

    def pop(self, count: int) -> tuple[int, tuple[Row, ...], int]:
        """Return the next rows as (sequence before them, rows, sequence up to which they go)."""
        after = self.popped
        ahead = (row for sequence, row in self.rows.items() if sequence > after)
        rows = tuple(islice(ahead, count))
        truncated = len(rows) == count and rows[-1].sequence < max(self.rows)
        self.popped = rows[-1].sequence if truncated else max(self.position, after)
        self.overdue = truncated
        return after, rows, self.popped

    def advance(self, position: int) -> None:
        """Note that no row up to `position` will be added."""
        self.position = max(self.position, position)

    def rewind(self, position: int) -> None:
        """Let `pop` return again what follows `position`; what is no longer kept is lost."""
        while self.evicted and self.evicted[-1] > position:
            self.evicted.pop()
            self.lost += 1
        popped = min(self.popped, max(position, self.oldest))
        self.overdue = popped < self.popped
        self.popped = popped

    def give_up_next(self) -> None:
        """Lose the row that `pop` would return next."""
        sequence = next(sequence for sequence in self.rows if sequence > self.popped)
        self._drop(sequence)
        self.popped = self.oldest = sequence
        self.lost += 1

    def settle(self, position: int) -> None:
        """Drop rows that will not be needed again."""
        for sequence in [sequence for sequence in self.rows if sequence <= position]:
            self._drop(sequence)
        while self.evicted and self.evicted[0] <= position:
            self.evicted.popleft()
        self.oldest = max(self.oldest, min(position, self.popped))

    @property
    def waiting(self) -> bool:
        """Whether `pop` would return rows or progress."""
        return self.position > self.popped

    def _drop(self, sequence: int) -> None:
        self.size_bytes -= row_bytes(self.rows.pop(sequence))


def row_bytes(row: NodeStep | NodeLayers) -> int:
    """Return about how much memory a row takes."""
    if isinstance(row, NodeLayers):
        return sum(len(block.values) + _NUMBER_BYTES * len(block.ranks) for block in row.blocks)
    numbers = 3 * len(row.values) + 2 * len(row.ranks)
    numbers += sum(len(own.columns) + len(own.ranks) + len(own.digests) for own in row.rows)
    return _NUMBER_BYTES * numbers


class ReportBuilder:
    """Builds the reports of one attempt, and keeps its rows until a receipt settles them."""

    def __init__(
        self, schema_index: SchemaIndex, *, position: int = 0, layers_position: int = 0
    ) -> None:
        self._schema_index = schema_index
        self._steps_per_report = STEPS_PER_REPORT
        self.steps: RowQueue[NodeStep] = RowQueue(STEPS_KEPT, position, position, position)
        self.tables: RowQueue[NodeLayers] = RowQueue(
            TABLES_KEPT, layers_position, layers_position, layers_position
        )

    @property
    def waiting(self) -> bool:
        """Whether there are rows or progress to report."""
        return self.steps.waiting or self.tables.waiting

    @property
    def overdue(self) -> bool:
        """Whether rows did not fit into the last report, or must be sent again."""
        return self.steps.overdue or self.tables.overdue

    def settle(self, position: int, layers_position: int) -> None:
        """Drop rows that will not be needed again."""
        self.steps.settle(position)
        self.tables.settle(layers_position)

    def fill(self, header: NodeReport, *, ended: bool) -> NodeReport:
        """Return a report with the next rows. ended: no further rows will be added."""
        after, steps, position = self.steps.pop(self._steps_per_report)
        layers_after, layers, layers_position = self.tables.pop(TABLES_PER_REPORT)
        layouts, layers = _own_layouts(layers, self._schema_index.layouts)
        columns = len(self._schema_index.step_columns)
        blocks, others = in_blocks(_with_columns(step, columns) for step in steps)
        return replace(
            header,
            final=ended and not self.waiting,
            step_columns=self._schema_index.step_columns if steps else (),
            families=family_columns(self._reported_families(steps, layers)),
            shares=tuple(self._schema_index.shares),
            holdings=tuple(self._schema_index.holdings),
            layouts=layouts,
            after=after,
            oldest=self.steps.oldest,
            position=position,
            steps=others,
            blocks=blocks,
            layers_after=layers_after,
            layers_oldest=self.tables.oldest,
            layers_position=layers_position,
            layers=layers,
        )

    def _reported_families(
        self, steps: Sequence[NodeStep], layers: Sequence[NodeLayers]
    ) -> Sequence[ColumnFamily]:
        """Return the families up to the last one that has rows: rows name them by number."""
        numbers = [row.family for step in steps for row in step.rows]
        numbers += [block.family for table in layers for block in table.blocks]
        return self._schema_index.families[: max(numbers, default=-1) + 1]

    def resend(self, report: NodeReport) -> None:
        """Have the rows of a report in the next one again, as far as they are still kept."""
        self.steps.rewind(report.after)
        self.tables.rewind(report.layers_after)

    def make_smaller(self, report: NodeReport) -> bool:
        """Put half as many steps into reports from now on, after `resend` of one that is too large.

        A step that is too large by itself is lost. Returns whether the report held any.
        """
        steps = len(report.steps) + sum(len(block.sequences) for block in report.blocks)
        if steps == 1 and self.steps.waiting:
            self.steps.give_up_next()
        self._steps_per_report = min(self._steps_per_report, max(steps // 2, 1))
        return steps > 0

    def acknowledge(self, receipt: Receipt) -> tuple[int, int]:
        """Drop what is settled, up to what is returned; after a refusal, resend what is missing.

        Nothing is settled that was not sent, whatever a damaged receipt says.
        """
        settled = min(receipt.settled, self.steps.popped)
        layers_settled = min(receipt.layers_settled, self.tables.popped)
        if not receipt.accepted:
            self.steps.rewind(receipt.position)
            self.tables.rewind(receipt.layers_position)
        self.settle(settled, layers_settled)
        return settled, layers_settled


def report_header(attempt: LocalAttempt, *, session: str, url: str) -> NodeReport:
    """Return a report with the state of a node's ranks, without rows."""
    identity = attempt.identity
    states = [source.state for source in attempt.sources.values()]
    return NodeReport(
        run=as_utf8(identity.run),
        session=session,
        attempt=identity.attempt,
        world_size=identity.world_size,
        node_rank=identity.node_rank,
        host=as_utf8(identity.host),
        url=url,
        sent_unix_seconds=time.time(),
        expected_ranks=tuple(sorted(attempt.expected_ranks)),
        known_ranks=tuple(sorted(attempt.known_ranks)),
        statuses=attempt.statuses(),
        held=attempt.held,
        probe_errors=sum(state.probe_errors for state in states),
        records_dropped=sum(state.records_dropped for state in states) + attempt.lost_here,
    )


def _with_columns(step: NodeStep, columns: int) -> NodeStep:
    """Return a step with values of all columns, also of those that have come up since."""
    absent = columns - len(step.values)
    return step if not absent else replace(step, values=step.values + (_ABSENT,) * absent)


def _own_layouts(
    tables: Sequence[NodeLayers], layouts: Sequence[Layout]
) -> tuple[tuple[Layout, ...], tuple[NodeLayers, ...]]:
    """Return the layouts that some tables use, and the tables re-indexed into those."""
    used = sorted({block.layout for table in tables for block in table.blocks})
    index = {layout: place for place, layout in enumerate(used)}

    def renumbered(block: LayerBlock) -> LayerBlock:
        return replace(block, layout=index[block.layout])

    return tuple(layouts[layout] for layout in used), tuple(
        replace(table, blocks=tuple(map(renumbered, table.blocks))) for table in tables
    )
