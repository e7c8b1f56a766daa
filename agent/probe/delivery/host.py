"""The way into the ring for steps whose numbers are on the host."""

from mp_agent.probe.step.open_step import ObservedStep, record_of
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.steps import LayerTable
from mp_agent.ring.writer import RingWriter


class HostDelivery:
    """Writes steps as they are offered."""

    def __init__(self, writer: RingWriter) -> None:
        self.wants_all_layers = False
        self._writer = writer
        self._open: ObservedStep | None = None

    def offer(self, step: ObservedStep, *, complete: bool) -> None:
        """Write the step. Layers go first: the reader that closes the step then has both."""
        self._open = None if complete else step
        if complete:
            self._write_layers(step)
        scalars = {name: float(value) for name, value in step.scalars.items()}
        totals_GC = None if step.totals_GC is None else step.totals_GC.numpy()
        self._writer.write_step(record_of(step, scalars, totals_GC), complete=complete)

    def collect(self) -> None:
        """Do nothing: what was offered is written."""

    def drain(self, limit_seconds: float) -> None:
        """Write the layers of a step that will not end."""
        step, self._open = self._open, None
        if step is not None:
            self._write_layers(step)

    def _write_layers(self, step: ObservedStep) -> None:
        if step.rows_LC is not None:
            families = {GRADIENTS.name: step.rows_LC.numpy()}
            self._writer.write_layers(LayerTable(sequence=step.sequence, families=families))
