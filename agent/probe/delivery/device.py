"""The way into the ring for steps whose numbers are on a device."""

from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite, isnan, prod

import numpy as np
import torch

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceConstants
from mp_agent.probe.delivery.other_families import (
    LAYER_HISTORY_STEPS,
    LAYER_SLOTS,
    OtherFamilies,
    OwnShares,
)
from mp_agent.probe.delivery.transfers import STEP_SLOTS, DeviceTransfers, RingMemory, TransferSlots
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.statistics.pieces import bounded_array
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.open_step import ObservedStep, record_of
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENT_COLUMNS, GRADIENTS
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray
from mp_agent.ring.format.device_part import HostPart
from mp_agent.ring.format.layout import DEVICE_SCALARS
from mp_agent.ring.writer import RingWriter


def unscaled(
    table_NC: FloatArray, inverse_scales: Sequence[float], rows_of_each: Sequence[slice]
) -> FloatArray:
    """Return the table with some ranges of rows unscaled, each by its own scale.

    A scale that is NaN leaves its rows as they are.
    """
    result_NC = np.array(table_NC)
    for inverse_scale, rows in zip(inverse_scales, rows_of_each, strict=True):
        if isnan(inverse_scale):
            continue
        for place, column in enumerate(GRADIENT_COLUMNS):
            for _ in range(column.unscaling.value):
                result_NC[rows, place] = bounded_array(result_NC[rows, place] * inverse_scale)
    return result_NC


def packed(
    step: ObservedStep, device: torch.device, *, with_totals: bool
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return one vector [N] on the device, and the names of the scalars in front.

    These are the scalars that are on a device; the scales that were not read follow them, and the
    totals, if they are to go along.
    """
    waiting = {
        name: value for name, value in step.scalars.items() if isinstance(value, torch.Tensor)
    }
    scales = [unread.inverse_scale for unread in step.unread_scales]
    parts = [
        value.to(device, torch.float64, non_blocking=True).reshape(1)
        for value in (*waiting.values(), *scales)
    ]
    if step.totals_GC is not None and with_totals:
        parts.append(step.totals_GC.reshape(-1))
    if not parts:
        return torch.empty(0, dtype=torch.float64, device=device), ()
    return torch.cat(parts), tuple(waiting)


def host_part(step: ObservedStep, names: tuple[str, ...], numbers: int) -> HostPart:
    """Return what the host knows of a step, and where `numbers` from the device have the rest.

    names: of the scalars in front of them; totals, where the device has them, are the last ones.
    """
    totals = len(names) + len(step.unread_scales)
    scalars = {
        name: value for name, value in step.scalars.items() if isinstance(value, float | int)
    }
    if step.totals_GC is not None and numbers == totals:
        # They are on the host: who reads this part has them no more.
        scalars["gradients_measured"] = 0.0
    return HostPart(
        sequence=step.sequence,
        step=step.step,
        time_unix_ns=step.time_unix_ns,
        scalars=scalars,
        places={name: place for place, name in enumerate(names)},
        numbers=numbers,
        totals_place=totals if numbers > totals else None,
    )


def on_host(
    scalars: Mapping[str, Scalar], names: tuple[str, ...], values_N: FloatArray
) -> dict[str, float]:
    """Return all scalars as floats: those called `names` from the front of `values_N`."""
    arrived = dict(zip(names, values_N.tolist(), strict=False))
    return {
        name: arrived[name] if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }


class DeviceDelivery:
    """Has steps copied to the host as transfers, and publishes them once they have come.

    Where the ring is registered with the device, all totals and rows are copied straight into it:
    what the device has brought can be read there although this process never publishes it.

    Every step's rows per layer stay on the device for `LAYER_HISTORY_STEPS` steps; they are
    copied out when due, and when the totals that arrive show trouble, unless they already lie in
    the ring. A step, or a layer table, that finds no slot is dropped and counted. Gradients on the
    host (offloaded ones) wait there for the scalars that are not.
    """

    def __init__(
        self,
        writer: RingWriter,
        schema: Schema,
        schedule: LayerSchedule,
        transfers: DeviceTransfers,
        *,
        device: torch.device,
        gradients_device: torch.device,
        order: Sequence[int] | None = None,
    ) -> None:
        """order: [L], where each row of the schema is among those of a step, if elsewhere."""
        columns = len(GRADIENT_COLUMN_NAMES)
        self.wants_all_layers = gradients_device == device
        step_size = len(schema.step_columns) + DEVICE_SCALARS
        layer_slots = 0
        self._own = OwnShares(schema)
        self._step_columns = schema.step_columns
        if self.wants_all_layers:
            step_size += self._own.parameter_shares * columns
            layer_slots = LAYER_SLOTS
        self._writer = writer
        self._schedule = schedule
        self._device = device
        self._order = None if order is None else list(order)
        self._constants = DeviceConstants()
        self._abandoned = False
        self._transfers = transfers
        self._ring = RingMemory.of(writer, device)
        self._steps = (
            TransferSlots.pinned(STEP_SLOTS, step_size, device)
            if self._ring is None
            else self._ring.steps
        )
        self._layers = TransferSlots.pinned(
            layer_slots, self._own.parameter_layers * columns, device
        )
        self._with_layers: set[int] = set()
        """Steps that are on their way, and of which a table of gradients was sent."""
        self._others = OtherFamilies(
            schema, self._own, transfers, device, writer, of_parameters=self.wants_all_layers
        )
        self._history: deque[tuple[int, torch.Tensor]] = deque(maxlen=LAYER_HISTORY_STEPS)
        self._open: ObservedStep | None = None

    @property
    def pending(self) -> int:
        """How many transfers are on their way."""
        return len(self._transfers)

    def offer(self, step: ObservedStep, *, complete: bool) -> None:
        """Send a complete step on its way; keep one under way for `drain`."""
        self._open = None if complete else step
        if complete:
            self._send(step, complete=True)

    def collect(self) -> None:
        """Publish what has arrived."""
        self._transfers.collect()

    def drain(self, limit_seconds: float) -> None:
        """Send what is open, and wait at most `limit_seconds` for everything to arrive."""
        step, self._open = self._open, None
        try:
            if step is not None:
                self._send(step, complete=False)
        finally:
            self._transfers.drain(limit_seconds)

    def retire(self) -> None:
        """Forget the step under way: it will be offered to the next delivery."""
        self._open = None
        if self._ring is not None and not self.pending and not self._abandoned:
            self._ring.release()

    def abandon(self) -> None:
        """Count what is on its way as lost."""
        self._abandoned = self._abandoned or self.pending > 0
        self._transfers.abandon()

    def _send(self, step: ObservedStep, *, complete: bool) -> None:
        def lose() -> None:
            if complete:
                self._writer.drop_step(step.sequence)

        if self._steps.full:
            # Not even its layers: nothing would show when the device has come past their copy.
            lose()
            return
        for stream in step.streams:
            if stream != accelerator.current_stream(self._device):
                accelerator.wait_for_stream(self._device, stream)
        self._others.send(step)
        if step.rows_LC is not None and self.wants_all_layers:
            self._keep_layers(step.sequence, step.rows_LC)
        payload_N, names = packed(step, self._device, with_totals=self.wants_all_layers)

        def publish(values_N: FloatArray) -> None:
            self._publish(step, values_N, names, complete=complete)

        if complete and self._ring is not None:
            self._ring.note(self._steps.sent + 1, host_part(step, names, payload_N.numel()))
        self._transfers.send(self._steps, payload_N, publish, lose)

    def _keep_layers(self, sequence: int, rows_LC: torch.Tensor) -> None:
        """Keep the rows, in the order of the schema, for as long as trouble may ask for them."""
        if self._order is not None:
            rows_LC = rows_LC.index_select(0, self._constants.on(self._device, self._order))
        self._history.append((sequence, rows_LC))
        if self._ring is not None:
            transfer_W = self._transfers.sealed(rows_LC.reshape(-1), sequence)
            accelerator.copy_to_host(self._ring.layers_at(sequence), transfer_W)
        if self._schedule.due(sequence):
            self._send_layers(sequence, rows_LC)

    def _publish(
        self, step: ObservedStep, values_N: FloatArray, names: tuple[str, ...], *, complete: bool
    ) -> None:
        scalars = on_host(step.scalars, names, values_N)
        if seconds := [each for timer in step.timers if (each := timer.seconds()) is not None]:
            scalars["probe_device_seconds"] = sum(seconds)
            self._schedule.budget.note_device_seconds(sum(seconds))
        if step.only_if_nonfinite and isfinite(scalars["loss"]):
            return
        scales = values_N[len(names) : len(names) + len(step.unread_scales)].tolist()
        totals_GC, rows_LC = None, None
        if self.wants_all_layers:
            if step.totals_GC is not None:
                start = len(names) + len(scales)
                totals_GC = values_N[start:].reshape(step.totals_GC.shape)
        else:
            if step.totals_GC is not None:
                parts = [unread.totals_rows for unread in step.unread_scales]
                totals_GC = unscaled(step.totals_GC.numpy(), scales, parts)
            if step.rows_LC is not None:
                parts = [unread.layer_rows for unread in step.unread_scales]
                rows_LC = unscaled(step.rows_LC.numpy(), scales, parts)
        try:
            if totals_GC is not None and self.wants_all_layers:
                self._look_for_trouble(step.sequence, totals_GC)
        finally:  # the step is here, whatever the device says when it is asked for more
            self._write(step, scalars, totals_GC, rows_LC, complete=complete)

    def _write(
        self,
        step: ObservedStep,
        scalars: Mapping[str, float],
        totals_GC: FloatArray | None,
        rows_LC: FloatArray | None,
        *,
        complete: bool,
    ) -> None:
        """Write a step that has arrived; rows_LC: of gradients on the host, with their table."""
        own = self._others.own_rows(step.sequence)
        if rows_LC is not None:
            ordered = rows_LC if self._order is None else rows_LC[self._order]
            self._write_layers(step.sequence, ordered, self._sampled_of(step))
        elif own and step.sequence not in self._with_layers:
            self._write_layers(step.sequence, None, {})
        self._with_layers.discard(step.sequence)
        sampled = {name: totals for name, (totals, _) in self._sampled_of(step).items()}
        self._others.forget(step.sequence)
        record = record_of(step, scalars, totals_GC, sampled, columns=self._step_columns)
        self._writer.write_step(self._own.step(record, own), complete=complete)
        if complete:
            self._schedule.note_step(step.sequence, scalars, totals_GC)

    def _sampled_of(self, step: ObservedStep) -> Mapping[str, tuple[FloatArray, FloatArray]]:
        """Return the other families of a step: those that have arrived, or that are here."""
        if self.wants_all_layers:
            return self._others.rows(step.sequence)
        return {
            name: (totals.numpy(), rows.numpy()) for name, (totals, rows) in step.sampled.items()
        }

    def _look_for_trouble(self, sequence: int, totals_GC: FloatArray) -> None:
        wanted = self._schedule.wanted_for_trouble(torch.from_numpy(totals_GC))
        if not wanted or self._schedule.due(sequence):
            return
        values_N = None if self._ring is None else self._ring.arrived_layers(sequence)
        if values_N is not None:
            self._with_layers.add(sequence)
            rows_LC = values_N.reshape(self._own.parameter_layers, -1)
            self._write_layers(sequence, rows_LC, self._others.rows(sequence))
            return
        for kept_sequence, kept_LC in self._history:
            if kept_sequence == sequence:
                self._send_layers(sequence, kept_LC)

    def _send_layers(self, sequence: int, rows_LC: torch.Tensor) -> None:
        shape = rows_LC.shape

        def publish(values_N: FloatArray) -> None:
            found = self._others.rows(sequence)
            self._write_layers(sequence, values_N.reshape(shape), found)

        def lose() -> None:
            self._with_layers.discard(sequence)
            self._writer.count(records_dropped=1)

        if self._transfers.send(self._layers, rows_LC.reshape(prod(shape)), publish, lose):
            self._with_layers.add(sequence)
        else:
            lose()

    def _write_layers(
        self,
        sequence: int,
        rows_LC: FloatArray | None,
        sampled: Mapping[str, tuple[FloatArray, FloatArray]],
    ) -> None:
        """rows_LC: in the order of the schema, which the rows of other families are yet to get."""
        families = {} if rows_LC is None else {GRADIENTS.name: rows_LC}
        for name, (_, own) in sampled.items():
            families[name] = own if self._order is None else own[self._order]
        table = self._own.table(sequence, families, self._others.own_rows(sequence))
        if table is not None:
            self._writer.write_layers(table)
