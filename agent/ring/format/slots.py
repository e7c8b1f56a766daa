"""Slots: numbered, checksummed places for payloads of one size, and transfers into them.

Slots: numbered, checksummed places for payloads of one size; see `layout` for their bytes.
Writers overwrite the oldest slot and never wait. Readers take a slot whole or not at all.

Transfers: numbers that a device copies into host memory, later than it was asked.
A transfer is int64[N + 2]: its number, the bits of N float64, and a checksum over both. The bytes
of a copy may become visible in any order, and no event marks the last one: a transfer is whole when
its checksum is right. The checksum is a weighted sum modulo 2^64, which a device computes in
two operations; each place has an odd weight of its own, so that what is added in one place and
missing in another does not cancel out.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from zlib import crc32

import numpy as np
import numpy.typing as npt

from mp_agent.records.steps import FloatArray

_HEADER = struct.Struct("=QII")
_TRAILER = struct.Struct("=Q")
_LOW_32_BITS = 0xFFFFFFFF
_READ_ATTEMPTS = 50
"""More than enough for a write in progress to end, or to become visible to this processor."""

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class SlotTable:
    """`count` slots of `payload_bytes` each (a multiple of 8), from `offset` on."""

    offset: int
    payload_bytes: int
    count: int

    @property
    def slot_bytes(self) -> int:
        """One slot, numbers and checksum included."""
        return _HEADER.size + self.payload_bytes + _TRAILER.size

    @property
    def end(self) -> int:
        """The first byte behind the slots."""
        return self.offset + self.count * self.slot_bytes

    def shifted(self, origin: int) -> "SlotTable":
        """Return the same slots, counted from `origin` bytes before."""
        return replace(self, offset=origin + self.offset)

    def offset_of(self, number: int) -> int:
        """Return the offset of write `number`."""
        return self.offset + number % self.count * self.slot_bytes


class SlotWriter:
    """Writes slots into mapped memory. One thread at a time; a signal handler may interrupt it."""

    def __init__(self, memory: memoryview, table: SlotTable) -> None:
        self._memory = memory
        self._offset, self._count = table.offset, table.count
        self._payload_bytes, self._slot_bytes = table.payload_bytes, table.slot_bytes

    def write(self, number: int, payload: Buffer) -> None:
        """Write `payload` as write `number`. Raises ValueError for a payload of another size."""
        begin = self._offset + number % self._count * self._slot_bytes + _HEADER.size
        end = begin + self._payload_bytes
        checksum = crc32(payload, number & _LOW_32_BITS)
        memory = self._memory
        memory[begin - _HEADER.size : begin] = _HEADER.pack(number, checksum, 0)
        memory[begin:end] = payload
        memory[end : end + _TRAILER.size] = _TRAILER.pack(number)


class SlotReader:
    """Reads slots through `read(offset, bytes)`, which counts from the table's own origin."""

    def __init__(self, read: Callable[[int, int], bytes], table: SlotTable) -> None:
        self._read = read
        self._table = table
        self._numbers = struct.Struct(f"=Q{table.slot_bytes - 8}x")

    def payload(self, number: int) -> bytes | None:
        """Return the payload of write `number`, or None when it was overwritten or never ended."""
        for _ in range(_READ_ATTEMPTS):
            found, payload = self._slot(number)
            if found == number and payload is not None:
                return payload
            if found > number:
                return None
        return None

    def newest(self) -> tuple[int, bytes] | None:
        """Return the last write and its payload, or None when nothing can be read."""
        table = self._table
        for _ in range(_READ_ATTEMPTS):
            data = self._read(table.offset, table.count * table.slot_bytes)
            written = sorted(filter(any, self._numbers.iter_unpack(data)), reverse=True)
            if not written:
                return None
            for (number,) in written:
                begin = number % table.count * table.slot_bytes
                found, payload = _payload_in(data[begin : begin + table.slot_bytes])
                if payload is not None:
                    return found, payload
        return None

    @property
    def count(self) -> int:
        """How many of the last writes are kept."""
        return self._table.count

    def _slot(self, number: int) -> tuple[int, bytes | None]:
        """Return the number found in the slot of write `number`; its payload if it is whole."""
        return _payload_in(self._read(self._table.offset_of(number), self._table.slot_bytes))


def _payload_in(data: bytes) -> tuple[int, bytes | None]:
    """Return the number of a slot, and its payload if it is whole."""
    found, checksum, _ = _HEADER.unpack_from(data)
    (found_again,) = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    if found == 0 or found != found_again:
        return found, None
    payload = data[_HEADER.size : -_TRAILER.size]
    whole = crc32(payload, found & _LOW_32_BITS) == checksum
    return found, payload if whole else None


Words = npt.NDArray[np.int64]

EXTRA_WORDS = 2
"""The number in front, and the checksum at the end."""


@lru_cache(maxsize=16)
def weights(words: int) -> Words:
    """Return the weight of each word of a transfer that precedes its checksum (splitmix64, odd)."""
    state = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    table = mixed.view(np.int64)
    table.flags.writeable = False
    return table


def whole_values(words_W: Words, number: int) -> FloatArray | None:
    """Return a copy of the float64 [N] of transfer `number`; None until it is whole.

    words_W: the memory of exactly that transfer, which may be changing.
    """
    if int(words_W[0]) != number:
        return None
    transfer_W = words_W.copy()
    body_W = transfer_W[:-1]
    whole = body_W[0] == number and (body_W * weights(len(body_W))).sum() == transfer_W[-1]
    return body_W[1:].view(np.float64) if whole else None
