"""What the digests of all devices have in common: weights' bits, summed as integers."""

from collections.abc import Iterable

import torch

DIGEST_MASK = 2**48 - 1
"""A sum modulo 2^48 is exact in a float64, and a part of a sum that wrapped at 2^64."""

DIGEST_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The integers in which a number's bits are read."""


def digest_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the type to which all numbers are widened before their bits are read."""
    any_double = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.float64 if any_double else torch.float32
