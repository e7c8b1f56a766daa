"""The way into the ring for steps with numbers on an accelerator."""

from collections import deque
from collections.abc import Mapping
from math import prod

import torch

from mp_agent.probe.delivery.pinned_copies import PinnedCopies, PinnedPool
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.open_step import ObservedStep, record_of
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENTS, STEP_COLUMN_NAMES
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray, LayerTable
from mp_agent.ring.writer import RingWriter

_STEP_SLOTS = 64
"""Steps that the host may be ahead of the device: launch queues hold about a thousand kernels."""
_LAYER_SLOTS = 4
_LAYER_HISTORY_STEPS = 8


class DeviceDelivery:
    """Has steps copied to pinned memory, and publishes them once they have come.

    Every step's rows per layer stay on the device for `_LAYER_HISTORY_STEPS` steps; they are
    copied out when due, and when the totals that arrive show trouble. A step that finds no free
    slot is dropped and counted. Gradients on the host (offloaded ones) wait there for the scalars
    that are not.
    """

    def __init__(
        self,
        writer: RingWriter,
        schema: Schema,
        schedule: LayerSchedule,
        copies: PinnedCopies,
        *,
        device: torch.device,
        gradients_device: torch.device,
    ) -> None:
        columns = len(GRADIENT_COLUMN_NAMES)
        self.wants_all_layers = gradients_device == device
        step_size = len(STEP_COLUMN_NAMES)
        layer_slots = 0
        if self.wants_all_layers:
            step_size += len(schema.shares) * columns
            layer_slots = _LAYER_SLOTS
        self._writer = writer
        self._schedule = schedule
        self._device = device
        self._copies = copies
        self._step_slots = PinnedPool(_STEP_SLOTS, step_size, device)
        self._layer_slots = PinnedPool(layer_slots, len(schema.layers) * columns, device)
        self._history: deque[tuple[int, torch.Tensor]] = deque(maxlen=_LAYER_HISTORY_STEPS)
        self._open: ObservedStep | None = None

    def offer(self, step: ObservedStep, *, complete: bool) -> None:
        """Send a complete step on its way; keep one under way for `drain`."""
        self._open = None if complete else step
        if complete:
            self._send(step, complete=True)

    def collect(self) -> None:
        """Publish what has arrived."""
        self._copies.collect()

    def drain(self, limit_seconds: float) -> None:
        """Send what is open, and wait at most `limit_seconds` for everything to arrive."""
        step, self._open = self._open, None
        if step is not None:
            self._send(step, complete=False)
        self._copies.drain(limit_seconds)

    def _send(self, step: ObservedStep, *, complete: bool) -> None:
        if step.rows_LC is not None and self.wants_all_layers:
            self._history.append((step.sequence, step.rows_LC))
            if self._schedule.due(step.sequence):
                self._send_layers(step.sequence, step.rows_LC)
        payload_N, names = self._pack(step)

        def publish(values_N: FloatArray) -> None:
            self._publish(step, values_N, names, complete=complete)

        if not self._copies.send(self._step_slots, payload_N, publish):
            self._writer.drop_step(step.sequence)

    def _pack(self, step: ObservedStep) -> tuple[torch.Tensor, tuple[str, ...]]:
        """Return one device vector [N]: the scalars that are on a device, then the totals."""
        waiting = {
            name: value for name, value in step.scalars.items() if isinstance(value, torch.Tensor)
        }
        parts = [
            value.to(self._device, torch.float64, non_blocking=True).reshape(1)
            for value in waiting.values()
        ]
        if step.totals_GC is not None and self.wants_all_layers:
            parts.append(step.totals_GC.reshape(-1))
        payload_N = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)
        return payload_N, tuple(waiting)

    def _publish(
        self, step: ObservedStep, values_N: FloatArray, names: tuple[str, ...], *, complete: bool
    ) -> None:
        scalars = _on_host(step.scalars, names, values_N)
        totals_GC = None
        if step.totals_GC is not None and self.wants_all_layers:
            totals_GC = values_N[len(names) :].reshape(step.totals_GC.shape)
            self._look_for_trouble(step.sequence, totals_GC)
        elif step.totals_GC is not None:
            totals_GC = step.totals_GC.numpy()
        if step.rows_LC is not None and not self.wants_all_layers:
            self._writer.write_layers(_layer_table(step.sequence, step.rows_LC.numpy()))
        self._writer.write_step(record_of(step, scalars, totals_GC), complete=complete)

    def _look_for_trouble(self, sequence: int, totals_GC: FloatArray) -> None:
        wanted = self._schedule.wanted_for_trouble(torch.from_numpy(totals_GC))
        if not wanted or self._schedule.due(sequence):
            return
        for kept_sequence, rows_LC in self._history:
            if kept_sequence == sequence:
                self._send_layers(sequence, rows_LC)

    def _send_layers(self, sequence: int, rows_LC: torch.Tensor) -> None:
        shape = rows_LC.shape

        def publish(values_N: FloatArray) -> None:
            self._writer.write_layers(_layer_table(sequence, values_N.reshape(shape)))

        self._copies.send(self._layer_slots, rows_LC.reshape(prod(shape)), publish)


def _layer_table(sequence: int, rows_LC: FloatArray) -> LayerTable:
    return LayerTable(sequence=sequence, families={GRADIENTS.name: rows_LC})


def _on_host(
    scalars: Mapping[str, Scalar], names: tuple[str, ...], values_N: FloatArray
) -> dict[str, float]:
    """Return all scalars as floats: those called `names` from the front of `values_N`."""
    arrived = dict(zip(names, values_N.tolist(), strict=False))
    return {
        name: arrived[name] if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }
