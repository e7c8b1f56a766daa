"""The way into the ring for steps whose numbers are on the host."""

from collections.abc import Sequence

from mp_agent.probe.delivery.own_shares import OwnRows, OwnShares
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.observed_step import ObservedStep, record_of
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.schema import Schema
from mp_agent.ring.writer import RingWriter


class HostDelivery:
    """Writes steps as they are offered."""

    pending = 0

    def __init__(
        self,
        writer: RingWriter,
        schema: Schema,
        schedule: LayerSchedule,
        order: Sequence[int] | None = None,
    ) -> None:
        """order: [L], where each row of the schema stands among those of a step, if elsewhere."""
        self.wants_all_layers = False
        self._writer = writer
        self._schedule = schedule
        self._own = OwnShares(schema)
        self._step_columns = schema.step_columns
        self._order = None if order is None else list(order)
        self._open: ObservedStep | None = None

    def offer(self, step: ObservedStep, *, complete: bool) -> None:
        """Write the step. Layers go first: the reader that closes the step then has both."""
        self._open = None if complete else step
        if complete:
            self._write_layers(step)
        scalars = {name: float(value) for name, value in step.scalars.items()}
        totals_GC = None if step.totals_GC is None else step.totals_GC.numpy()
        sampled = {name: totals.numpy() for name, (totals, _) in step.sampled.items()}
        record = record_of(step, scalars, totals_GC, sampled, columns=self._step_columns)
        self._writer.write_step(self._own.step(record, _own_rows(step)), complete=complete)
        if complete:
            self._schedule.note_step(step.sequence, scalars, totals_GC)

    def collect(self) -> None:
        """Do nothing: what was offered is written."""

    def drain(self, limit_seconds: float) -> None:
        """Write the layers of a step that will not end."""
        step, self._open = self._open, None
        if step is not None:
            self._write_layers(step)

    def retire(self) -> None:
        """Write the layers of a step that will end under the next schema."""
        self.drain(0.0)

    def abandon(self) -> None:
        """Do nothing: nothing is on its way."""

    def _write_layers(self, step: ObservedStep) -> None:
        families = {}
        if step.rows_LC is not None:
            rows = {GRADIENTS.name: step.rows_LC.numpy()}
            rows |= {name: own.numpy() for name, (_, own) in step.sampled.items()}
            families = {
                name: own if self._order is None else own[self._order] for name, own in rows.items()
            }
        table = self._own.table(step.sequence, families, _own_rows(step))
        if table is not None:
            self._writer.write_layers(table)


def _own_rows(step: ObservedStep) -> OwnRows:
    return {name: rows_MC.numpy() for name, rows_MC in step.own_rows.items()}
