"""What the digests of all devices have in common: bits, as integers of 32 bits, summed."""

import torch

DIGEST_MASK = 2**32 - 1
"""A sum modulo 2^32 shows every single bit that differs, and sums of it stay exact in a float64."""

DIGEST_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The integers in which a number's bits are read."""


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of strided numbers as integers of at most 32 bits.

    Narrower numbers are widened to 32 bits, which changes none; wider ones are two integers each.
    """
    if values.is_floating_point():
        values = values if values.dtype is torch.float64 else values.float()
    elif values.itemsize < 8:
        return values.int()
    return values.contiguous().view(-1).view(torch.int32)
