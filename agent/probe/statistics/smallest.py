"""The smallest magnitude that is not zero, in two passes over numbers of either sign.

Twice the bits of a float, less one, leaves out its sign, and wraps zero to the largest unsigned
integer; the same less half the range orders alike as signed integers, of which torch knows the
smallest. NaN and Inf come after all finite numbers.
"""

import torch

from mp_agent.probe.statistics.digest import DIGEST_BITS


def _shift(bits: torch.dtype) -> torch.Tensor:
    return torch.tensor(torch.iinfo(bits).max, dtype=bits, device="cpu")


INTEGERS = {**DIGEST_BITS, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""As wide as the floats."""

_SHIFTS = {dtype: _shift(bits) for dtype, bits in INTEGERS.items()}
"""2^31 - 1 is both -1 and minus half the range, modulo 2^32; so with 16 and 64 bits."""


def put_in_order(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `out`, overwritten with integers whose smallest stands for the smallest magnitude.

    out: of the integers as wide as `values`; may lie in the same memory.
    """
    bits = values.view(out.dtype)
    return torch.add(_SHIFTS[values.dtype], bits, alpha=2, out=out)


def magnitudes(ordered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the magnitudes that integers of `put_in_order` stand for; -0.0 for a zero."""
    quarter = torch.iinfo(ordered.dtype).max // 2 + 1
    return (ordered >> 1).add_(quarter + 1).view(dtype)
