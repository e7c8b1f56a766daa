"""Transfers from a device into host memory, and into the ring itself.

Transfers from a device: checksummed there, copied to the host in order, used once whole.
Nothing asks the runtime whether a copy has come: after an error of the device every question is
answered with that error, though what came before it lies on the host.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceConstants
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray
from mp_agent.ring.format.device_part import HostPart
from mp_agent.ring.format.slots import EXTRA_WORDS, Words, weights, whole_values
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.writer import RingWriter

_POLL_SECONDS = 0.001

Receiver = Callable[[FloatArray], None]


class TransferSlots:
    """Equal slots on the host that a device writes to, used one after the other."""

    def __init__(self, memory_SW: torch.Tensor) -> None:
        """memory_SW: int64 [S, W] on the host, all zero; W is the room for a whole transfer."""
        self.sent = 0
        """Transfers are numbered from 1 on; number n lies in slot n modulo S."""
        self.received = 0
        self._memory_SW = memory_SW
        self._words_SW: Words = memory_SW.numpy()

    @classmethod
    def pinned(cls, slots: int, size: int, device: torch.device) -> "TransferSlots":
        """Return slots for transfers of up to `size` numbers, in memory of its own."""
        return cls(accelerator.pinned_zeros((slots, size + EXTRA_WORDS), device))

    @property
    def full(self) -> bool:
        """Whether the next transfer would overwrite one that is yet to arrive."""
        return self.sent - self.received >= len(self._memory_SW)

    def slot_of(self, number: int) -> tuple[torch.Tensor, Words]:
        """Return where transfer `number` lies, as both kinds of array."""
        slot = number % len(self._memory_SW)
        return self._memory_SW[slot], self._words_SW[slot]


class _Expected(NamedTuple):
    slots: TransferSlots
    number: int
    words_W: Words
    receiver: Receiver
    lose: Callable[[], None]


class DeviceTransfers:
    """Device vectors on their way to the host, handed over in the order in which they were sent.

    All calls come from the training thread; only it makes calls to the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._constants = DeviceConstants()
        self._expected: deque[_Expected] = deque()

    def __len__(self) -> int:
        """Return how many transfers are on their way."""
        return len(self._expected)

    def send(
        self,
        slots: TransferSlots,
        payload_N: torch.Tensor,
        then: Receiver,
        lose: Callable[[], None] = lambda: None,
    ) -> bool:
        """Begin to copy float64 `payload_N`; `then` gets the values [N] from a later `collect`.

        Returns False, and sends nothing, when no slot is free. lose: called by `abandon`.
        """
        if slots.full:
            return False
        number = slots.sent + 1
        transfer_W = self.sealed(payload_N, number)
        slot, words = slots.slot_of(number)
        size = transfer_W.numel()
        accelerator.copy_to_host(slot[:size], transfer_W)
        slots.sent = number
        self._expected.append(_Expected(slots, number, words[:size], then, lose))
        return True

    def sealed(self, payload_N: torch.Tensor, number: int) -> torch.Tensor:
        """Return transfer `number` as int64 [N + 2], computed on the device."""
        number_1 = torch.full((1,), number, dtype=torch.int64, device=self._device)
        body_W = torch.cat((number_1, payload_N.view(torch.int64)))
        weights_W = self._constants.on(self._device, weights(body_W.numel()))
        return torch.cat((body_W, (body_W * weights_W).sum().reshape(1)))

    def collect(self) -> None:
        """Hand over what has arrived; never waits, and makes no call to the device.

        What a receiver raises is raised once the others have what is theirs.
        """
        failure: Exception | None = None
        while self._expected:
            first = self._expected[0]
            values_N = whole_values(first.words_W, first.number)
            if values_N is None:
                break
            self._expected.popleft()
            first.slots.received = first.number
            try:
                first.receiver(values_N)
            except Exception as error:
                pass_on(error)
                failure = failure or error
        if failure is not None:
            raise failure

    def drain(self, limit_seconds: float) -> None:
        """Hand over everything, waiting at most `limit_seconds` in all."""
        deadline = time.monotonic() + limit_seconds
        self.collect()
        while self._expected and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self.collect()

    def abandon(self) -> None:
        """Give up what has not arrived; the slots that it may still be copied to are not used."""
        while self._expected:
            self._expected.popleft().lose()


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
