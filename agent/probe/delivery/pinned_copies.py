"""Copies from a device into pinned memory, without waiting for them."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from mp_agent.records.steps import FloatArray

_POLL_SECONDS = 0.001


class Event(Protocol):
    """What is used of a device event."""

    def query(self) -> bool:
        """Return whether the device has come past the event."""


class PinnedPool:
    """`slots` equal pieces of pinned memory, made at once: making some makes the device wait."""

    def __init__(self, slots: int, size: int, device: torch.device) -> None:
        memory = torch.empty(slots, size, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._free = list(memory.unbind())

    def pop(self) -> torch.Tensor | None:
        """Return a free piece, or None."""
        return self._free.pop() if self._free else None

    def push(self, piece: torch.Tensor) -> None:
        """Make a piece free again."""
        self._free.append(piece)


class _Copy(NamedTuple):
    event: Event
    pool: PinnedPool
    piece: torch.Tensor
    size: int
    open: Callable[[FloatArray], None]


class PinnedCopies:
    """Device vectors on their way to the host, handed over in the order in which they were sent.

    All calls come from the training thread; only it makes calls to the device.
    """

    def __init__(
        self, device: torch.device, mark: Callable[[torch.device], Event] | None = None
    ) -> None:
        self._device = device
        self._mark = mark or _record_cuda_event
        self._copies: deque[_Copy] = deque()

    def send(
        self, pool: PinnedPool, payload_N: torch.Tensor, then: Callable[[FloatArray], None]
    ) -> bool:
        """Begin to copy `payload_N`; `then` gets the values [N] from a later `collect`.

        Returns False, and sends nothing, when the pool has no free piece.
        """
        piece = pool.pop()
        if piece is None:
            return False
        size = payload_N.numel()
        piece[:size].copy_(payload_N, non_blocking=True)
        self._copies.append(_Copy(self._mark(self._device), pool, piece, size, then))
        return True

    def collect(self) -> None:
        """Hand over what has arrived; never waits."""
        while self._copies and self._copies[0].event.query():
            letter = self._copies.popleft()
            values_N = letter.piece[: letter.size].numpy().copy()
            letter.pool.push(letter.piece)
            letter.open(values_N)

    def drain(self, limit_seconds: float) -> None:
        """Hand over everything, waiting at most `limit_seconds` in all."""
        deadline = time.monotonic() + limit_seconds
        self.collect()
        while self._copies and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self.collect()


def _record_cuda_event(device: torch.device) -> Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
