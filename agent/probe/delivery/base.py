"""How a seen step gets from its device into the ring, without ever making training wait."""

from collections.abc import Sequence
from typing import Protocol

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.delivery.device import DeviceDelivery
from mp_agent.probe.delivery.host import HostDelivery
from mp_agent.probe.delivery.transfers import DeviceTransfers
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.observed_step import ObservedStep
from mp_agent.records.schema import Schema
from mp_agent.ring.writer import RingWriter


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
        """Take a step: as it stands while it is under way, at its end with `complete`."""

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

    order: [L], where each row of the schema stands among those of a step, if elsewhere.
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
