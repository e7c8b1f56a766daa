"""The part of the ring that a device copies to, so that nothing is lost with the process."""

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.delivery.transfers import TransferSlots
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray
from mp_agent.ring.format.device_part import HostPart
from mp_agent.ring.format.transfers import whole_values
from mp_agent.ring.writer import RingWriter

STEP_SLOTS = 64
"""Steps that the host may be ahead of the device: launch queues hold about a thousand kernels."""
_LAYER_SLOTS_AT_MOST = 8
_LAYER_SLOTS_AT_LEAST = 2
_LAYER_BYTES = 4 << 20
"""Shared memory for the rows of the last steps, as far as the least number of them fits."""


class _Refusal:
    """Whether registering was refused in this process: it is then not tried again."""

    seen = False


def device_slots(
    schema: Schema, gradients_device: torch.device, device: torch.device | None
) -> tuple[int, int]:
    """Return how many steps, and tables of layers, a device is to have room for in the ring.

    device: what the numbers are brought from; None where they are on the host.
    """
    if device is None or _Refusal.seen:
        return 0, 0
    row_bytes = 8 * len(GRADIENT_COLUMN_NAMES) * max(1, schema.parameter_layers)
    tables = min(_LAYER_SLOTS_AT_MOST, max(_LAYER_SLOTS_AT_LEAST, _LAYER_BYTES // row_bytes))
    return STEP_SLOTS, tables if gradients_device == device else 0


class RingMemory:
    """Slots in the newest body of a ring that is registered with a device.

    steps: slots of the steps' transfers.
    """

    def __init__(self, writer: RingWriter) -> None:
        part, region = writer.device_part, writer.hold_region()
        assert part is not None and region is not None
        self.steps = TransferSlots(torch.from_numpy(part.memory.steps_SW))
        self._layers_SW = torch.from_numpy(part.memory.layers_SW)
        self._part = part
        self._region = region

    @classmethod
    def of(cls, writer: RingWriter, device: torch.device) -> "RingMemory | None":
        """Return the memory of the newest body; None where there is none, or it is refused."""
        part, region = writer.device_part, writer.region
        if part is None or region is None:
            return None
        if not region.registered:
            region.registered = accelerator.register_host_memory(part.memory.mapped, device)
        if not region.registered:
            _Refusal.seen = True
            return None
        return cls(writer)

    def note(self, number: int, part: HostPart) -> None:
        """Write what the host knows of the step in transfer `number`."""
        self._part.write(number, part)

    def layers_at(self, sequence: int) -> torch.Tensor:
        """Return the slot [W] for the layers of a step; steps before it are in the others."""
        return self._layers_SW[sequence % len(self._layers_SW)]

    def arrived_layers(self, sequence: int) -> FloatArray | None:
        """Return the rows [L C] of the layers of a step; None unless they lie here whole."""
        slots_SW = self._part.memory.layers_SW
        return whole_values(slots_SW[sequence % len(slots_SW)], sequence)

    def release(self) -> None:
        """Let a later body have the memory: the device writes to it no more."""
        self._region.held = False
