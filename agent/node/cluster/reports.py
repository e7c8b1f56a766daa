"""The node's side of a push: rows wait here until the root has them in its ledger."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from msgspec.structs import replace

from mp_agent.node.collect.attempt import LocalAttempt
from mp_agent.node.merge.schema_index import SchemaIndex
from mp_agent.records.rows import (
    STEPS_PER_REPORT,
    TABLES_PER_REPORT,
    LayerBlock,
    Layout,
    NodeLayers,
    NodeReport,
    NodeStep,
    Receipt,
)
from mp_agent.records.steps import EndReason
from mp_agent.records.text import as_utf8

Ends = tuple[EndReason, ...]
"""How the ranks of a node ended, in their order."""


class ReportTimes:
    """Remembers what the last report was about, and what has happened since."""

    def __init__(self, interval_seconds: float) -> None:
        self.urgent = False
        """Whether trouble began on this node since the last report."""
        self._interval_seconds = interval_seconds
        self._troubled = False
        self._reported_seconds: float | None = None
        self._reported_ends: Ends = ()

    def look_at(self, step: NodeStep, gradient_columns: tuple[str, ...]) -> None:
        """Take in whether a step of the node has something that cannot wait."""
        troubled = is_troubled(step, gradient_columns)
        self.urgent = self.urgent or (troubled and not self._troubled)
        self._troubled = troubled

    def due(self, now_seconds: float, ends: Ends) -> bool:
        """Return whether a report is to be made now."""
        if self._reported_seconds is None or self.urgent or ends != self._reported_ends:
            return True
        return now_seconds - self._reported_seconds >= self._interval_seconds

    def reported(self, now_seconds: float, ends: Ends) -> None:
        """Note that a report was made."""
        self._reported_seconds, self._reported_ends = now_seconds, ends
        self.urgent = False


_NONFINITE_COLUMNS = ("nan_elements", "inf_elements")


def is_troubled(step: NodeStep, gradient_columns: Sequence[str]) -> bool:
    """Return whether a rank of the node had a loss or gradients that are not finite."""
    if step.nonfinite_loss_ranks:
        return True
    places = [
        gradient_columns.index(name) for name in _NONFINITE_COLUMNS if name in gradient_columns
    ]
    return any(row.columns[place] > 0.0 for row in step.rows for place in places)


STEPS_KEPT = 2048
TABLES_KEPT = 16

Row = TypeVar("Row", NodeStep, NodeLayers)


@dataclass(slots=True)
class RowQueue(Generic[Row]):
    """Rows in ascending sequence that may have to be sent, or sent again.

    At most `limit` are kept; beyond it the oldest are lost.
    """

    limit: int
    position: int
    """No row up to this sequence will be added any more."""
    taken: int
    """Rows up to this sequence were handed out."""
    oldest: int
    """Rows up to this sequence are not kept any more."""
    overdue: bool = False
    """Whether there are rows that could have been handed out before."""
    lost: int = 0
    """Rows that went beyond the limit before the root had them."""
    rows: dict[int, Row] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows[row.sequence] = row
        self.position = max(self.position, row.sequence)
        if len(self.rows) > self.limit:
            self.oldest = next(iter(self.rows))
            self.lost += self.oldest > self.taken
            del self.rows[self.oldest]

    def take(self, count: int) -> tuple[int, tuple[Row, ...], int]:
        """Hand out rows: return (after which sequence, rows, up to which sequence)."""
        after = self.taken
        ahead = (row for sequence, row in self.rows.items() if sequence > after)
        rows = tuple(islice(ahead, count))
        cut = len(rows) == count and rows[-1].sequence < max(self.rows)
        self.taken = rows[-1].sequence if cut else max(self.position, after)
        self.overdue = cut
        return after, rows, self.taken

    def advance(self, position: int) -> None:
        """Note that no row up to `position` will be added any more."""
        self.position = max(self.position, position)

    def rewind(self, position: int) -> None:
        """Hand out again what follows `position`, as far as it is kept."""
        taken = min(self.taken, max(position, self.oldest))
        self.overdue = taken < self.taken
        self.taken = taken

    def settle(self, position: int) -> None:
        """Let go of what will not be asked for again."""
        for sequence in [sequence for sequence in self.rows if sequence <= position]:
            del self.rows[sequence]
        self.oldest = max(self.oldest, min(position, self.taken))

    @property
    def waiting(self) -> bool:
        """Whether there is something to hand out."""
        return self.position > self.taken


class ReportBuilder:
    """Makes the reports of one attempt, and keeps its rows until a receipt settles them."""

    def __init__(
        self, schema_index: SchemaIndex, *, position: int = 0, layers_position: int = 0
    ) -> None:
        self._schema_index = schema_index
        self.steps: RowQueue[NodeStep] = RowQueue(STEPS_KEPT, position, position, position)
        self.tables: RowQueue[NodeLayers] = RowQueue(
            TABLES_KEPT, layers_position, layers_position, layers_position
        )

    @property
    def waiting(self) -> bool:
        """Whether there are rows, or is progress, to report."""
        return self.steps.waiting or self.tables.waiting

    @property
    def overdue(self) -> bool:
        """Whether rows are left over from the last report, or must be sent again."""
        return self.steps.overdue or self.tables.overdue

    def settle(self, position: int, layers_position: int) -> None:
        """Let go of rows that will not be asked for again."""
        self.steps.settle(position)
        self.tables.settle(layers_position)

    def fill(self, header: NodeReport, *, ended: bool) -> NodeReport:
        """Return a report with the next rows. ended: no further rows will be added."""
        after, steps, position = self.steps.take(STEPS_PER_REPORT)
        layers_after, layers, layers_position = self.tables.take(TABLES_PER_REPORT)
        layouts, layers = _own_layouts(layers, self._schema_index.layouts)
        return replace(
            header,
            final=ended and not self.waiting,
            step_columns=self._schema_index.step_columns,
            gradient_columns=self._schema_index.gradient_columns,
            shares=tuple(self._schema_index.shares),
            holdings=tuple(self._schema_index.holdings),
            layouts=layouts,
            after=after,
            oldest=self.steps.oldest,
            position=position,
            steps=steps,
            layers_after=layers_after,
            layers_oldest=self.tables.oldest,
            layers_position=layers_position,
            layers=layers,
        )

    def acknowledge(self, receipt: Receipt) -> None:
        """Let go of what is settled; on a refusal, hand out again what the root lacks."""
        if not receipt.taken:
            self.steps.rewind(receipt.position)
            self.tables.rewind(receipt.layers_position)
        self.settle(receipt.settled, receipt.layers_settled)


def report_header(attempt: LocalAttempt, *, session: str, url: str) -> NodeReport:
    """Return a report that says how the ranks of a node stand, without rows."""
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


def _own_layouts(
    tables: Sequence[NodeLayers], layouts: Sequence[Layout]
) -> tuple[tuple[Layout, ...], tuple[NodeLayers, ...]]:
    """Return the layouts that some tables use, and the tables with indices into those."""
    used = sorted({block.layout for table in tables for block in table.blocks})
    index = {layout: place for place, layout in enumerate(used)}

    def renumbered(block: LayerBlock) -> LayerBlock:
        return replace(block, layout=index[block.layout])

    return tuple(layouts[layout] for layout in used), tuple(
        replace(table, blocks=tuple(map(renumbered, table.blocks))) for table in tables
    )
