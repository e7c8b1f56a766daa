"""Transfers: numbers that a device copies into host memory by itself, later than it was asked.

A transfer is int64[N + 2]: its number, the bits of N float64, and a checksum over both. The bytes
of a copy may become visible in any order, and no event marks the last one: a transfer is whole when
its checksum is right. The checksum is a weighted sum modulo 2^64, which a device computes in
two operations; each place has an odd weight of its own, so that what is added in one place and
missing in another does not cancel out.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mp_agent.records.steps import FloatArray

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
