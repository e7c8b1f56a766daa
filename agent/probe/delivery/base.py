"""How a seen step gets from its device into the ring, without ever making training wait."""

from collections.abc import Callable
from typing import Protocol

import torch

from mp_agent.probe.delivery.device import DeviceDelivery
from mp_agent.probe.delivery.host import HostDelivery
from mp_agent.probe.delivery.pinned_copies import PinnedCopies
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.open_step import ObservedStep
from mp_agent.records.schema import Schema
from mp_agent.ring.writer import RingWriter


class Delivery(Protocol):
    """Takes steps in, in order, and sees them into the ring.

    wants_all_layers: whether it keeps the rows per layer of every step, since on its device
    trouble shows only when it is too late to look.
    """

    wants_all_layers: bool

    def offer(self, step: ObservedStep, *, complete: bool) -> None:
        """Take a step: as it stands while it is under way, at its end with `complete`."""

    def collect(self) -> None:
        """Publish what has arrived on the host since."""

    def drain(self, limit_seconds: float) -> None:
        """Publish everything offered, waiting for the device at most `limit_seconds`."""


def make_delivery(
    writer: RingWriter, schema: Schema, schedule: LayerSchedule, gradients_device: torch.device
) -> Delivery:
    """Return the way to the ring for gradients on `gradients_device`."""
    device = gradients_device
    if device.type == "cpu":
        computing = _computing_device()
        if computing is None:
            return HostDelivery(writer)
        device = computing
    return DeviceDelivery(
        writer,
        schema,
        schedule,
        PinnedCopies(device),
        device=device,
        gradients_device=gradients_device,
    )


def _computing_device() -> torch.device | None:
    """Return the GPU that this process computes on, whose losses the host must not wait for.

    Its gradients may be on the host all the same: FSDP offloads them.
    """
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    return torch.device("cuda", torch.cuda.current_device()) if initialized() else None
