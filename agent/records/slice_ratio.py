"""A ratio and the index of the slice at fault, in one float64 that a maximum can be taken of.

The index is in the low bits of the fraction, so that the larger ratio is the larger number and
brings its own index with it; of equal ratios the higher index is taken. The ratio keeps 32 bits of
its fraction.
"""

import struct

INDEX_BITS = 20
SLICES_AT_MOST = 1 << INDEX_BITS
"""Along one dimension."""
_INDEX_MASK = SLICES_AT_MOST - 1


def packed(ratio: float, index: int) -> float:
    """Return both as one number; ratio: finite and above 0. index: below `SLICES_AT_MOST`."""
    (bits,) = struct.unpack("<q", struct.pack("<d", ratio))
    return _number(bits & ~_INDEX_MASK | index)


def ratio_of(value: float) -> float:
    """Return the ratio, to 32 bits of its fraction."""
    return packed(value, 0)


def index_of(value: float) -> int:
    """Return the index of the slice."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits & _INDEX_MASK)


def _number(bits: int) -> float:
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(value)
