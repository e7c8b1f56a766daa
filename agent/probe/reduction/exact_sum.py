"""Sums of float64 that are exact in any order, by integers that a collective can add up.

A float64 is an integer times 2^-1074. Cut into parts of 32 bits it is 66 integers that can be added
up over 2^31 ranks without overflow; the sum of the parts is rounded once, as `math.fsum` does.
"""

from math import inf

import numpy as np
import numpy.typing as npt

PARTS = 66
"""Parts of 32 bits in the largest float64."""
_EXPONENT = 1074

IntArray = npt.NDArray[np.int64]


def parts_of(value: float) -> IntArray:
    """Return a finite float64 as parts [PARTS], the lowest first, all of its sign."""
    numerator, denominator = abs(value).as_integer_ratio()
    scaled = numerator * (1 << _EXPONENT) // denominator
    parts = np.frombuffer(scaled.to_bytes(4 * PARTS, "little"), dtype="<u4").astype(np.int64)
    return -parts if value < 0.0 else parts


def value_of(parts: IntArray) -> float:
    """Return the float64 next to the sum that `parts` [PARTS] stand for; Inf beyond float64."""
    total = 0
    for part in reversed(parts.tolist()):
        total = (total << 32) + part
    try:
        return total / (1 << _EXPONENT)
    except OverflowError:
        return inf if total > 0 else -inf
