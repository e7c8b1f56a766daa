"""The way into the ring for steps whose numbers are on the host, or on a device."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.delivery.device import DeviceDelivery
from mp_agent.probe.delivery.other_families import OwnRows, OwnShares
from mp_agent.probe.delivery.transfers import STEP_SLOTS, DeviceTransfers
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.open_step import ObservedStep, record_of
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
        """order: [L], where each row of the schema is among those of a step, if elsewhere."""
        self.wants_all_layers = False
        self._writer = writer
        self._schedule = schedule
        self._own = OwnShares(schema)
        self._has_own = self._own.parameter_shares < len(schema.shares)
        self._step_columns = schema.step_columns
        self._order = None if order is None else list(order)
        self._open: ObservedStep | None = None

    def offer(self, step: ObservedStep, *, complete: bool) -> None:
        """Write the step. Layers go first: the reader that closes the step then has both."""
        self._open = None if complete else step
        own = _own_rows(step) if step.own_rows else {}
        if complete and (own or step.rows_LC is not None):
            self._write_layers(step)
        scalars = {name: float(value) for name, value in step.scalars.items()}
        totals_GC = None if step.totals_GC is None else step.totals_GC.numpy()
        sampled = {name: totals.numpy() for name, (totals, _) in step.sampled.items()}
        record = record_of(step, scalars, totals_GC, sampled, columns=self._step_columns)
        if self._has_own:
            record = self._own.step(record, own)
        self._writer.write_step(record, complete=complete)
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


class Delivery(Protocol):
    """Takes steps in, in order, and sees them into the ring.

    wants_all_layers: whether it keeps the rows per layer of every step, since on its device
    trouble shows only when it is too late to look.
    """

    wants_all_layers: bool

    @property
    def pending(self) -> int:
        """How much of what was offered complete is not in the ring yet."""

    def offer(self, step: ObservedStep, *, complete: bool) -> None:
        """Take a step: as it is while it is under way, at its end with `complete`."""

    def collect(self) -> None:
        """Publish what has arrived on the host since."""

    def drain(self, limit_seconds: float) -> None:
        """Publish everything offered, waiting for the device at most `limit_seconds`."""

    def retire(self) -> None:
        """Take no more: the step under way will be offered to the next delivery."""

    def abandon(self) -> None:
        """Count what is still pending as lost."""


def source_of(gradients_device: torch.device) -> torch.device | None:
    """Return the device from which numbers have to be brought; None where all are on the host."""
    if accelerator.is_on_host(gradients_device):
        return accelerator.computing_device()
    return gradients_device if accelerator.is_supported(gradients_device) else None


def make_delivery(
    writer: RingWriter,
    schema: Schema,
    schedule: LayerSchedule,
    gradients_device: torch.device,
    order: Sequence[int] | None,
) -> Delivery:
    """Return the way to the ring for gradients on `gradients_device`.

    order: [L], where each row of the schema is among those of a step, if elsewhere.
    """
    device = source_of(gradients_device)
    if device is None:
        return HostDelivery(writer, schema, schedule, order)
    return DeviceDelivery(
        writer,
        schema,
        schedule,
        DeviceTransfers(device),
        device=device,
        gradients_device=gradients_device,
        order=order,
    )


_HELD_AT_MOST = STEP_SLOTS
"""Steps of new schemas that are held back before the device is no longer waited for."""


class SucceedingDelivery:
    """Holds steps back until those of the delivery before are in the ring, then begins the next.

    The ring takes records of one schema after the other. No step waits for the device: what the
    device has not brought after `_HELD_AT_MOST` more steps is counted as lost.
    """

    def __init__(
        self, before: Delivery, begin: Callable[[], Delivery], *, wants_all_layers: bool
    ) -> None:
        """begin: writes the new schema, and returns its delivery; called until it succeeds."""
        self.wants_all_layers = wants_all_layers
        self._current = before
        """The delivery before, which is let go of once the next one has begun."""
        self._begin = begin
        self._begun = False
        self._held: list[ObservedStep] = []
        self._open: ObservedStep | None = None

    @property
    def pending(self) -> int:
        """How much is not in the ring yet, of either schema."""
        return self._current.pending + len(self._held)

    @property
    def _held_in_all(self) -> int:
        """Steps that are held back here, and by the one before if that waits for another."""
        before = self._current
        return len(self._held) + (
            before._held_in_all if isinstance(before, SucceedingDelivery) else 0
        )

    def offer(self, step: ObservedStep, *, complete: bool) -> None:
        """Pass the step on, or hold it back."""
        if self._begun:
            self._current.offer(step, complete=complete)
            return
        self._open = None if complete else step
        if complete:
            self._held.append(step)
        if self._held_in_all >= _HELD_AT_MOST:
            self._current.abandon()
        self.collect()

    def collect(self) -> None:
        """Publish what has arrived; begin the next one when nothing is left of the one before."""
        self._current.collect()
        if not self._begun and not self._current.pending:
            self._succeed()

    def drain(self, limit_seconds: float) -> None:
        """Publish everything of both, waiting for the device at most `limit_seconds` in all."""
        deadline_seconds = time.monotonic() + limit_seconds
        if not self._begun:
            self._current.drain(limit_seconds)
            self._current.abandon()
            self._succeed()
        self._current.drain(max(0.0, deadline_seconds - time.monotonic()))

    def retire(self) -> None:
        """Forget the step under way."""
        self._open = None
        if self._begun:
            self._current.retire()

    def abandon(self) -> None:
        """Count what is on its way as lost."""
        self._current.abandon()

    def _succeed(self) -> None:
        self._current.retire()
        self._current = self._begin()
        self._begun = True
        held, self._held = self._held, []
        for step in held:
            self._current.offer(step, complete=True)
        if self._open is not None:
            self._current.offer(self._open, complete=False)
            self._open = None
