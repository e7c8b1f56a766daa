"""Every value of a small format, from its bits: an independent reference for steps and rounding."""

from bisect import bisect_left, bisect_right
from functools import cache

import torch

from mp_agent.plan.precision_plan import BF16, FP8_E4M3, FP8_E5M2, FP16, NumberFormat

_BITS = {
    FP16: (torch.float16, torch.int16),
    BF16: (torch.bfloat16, torch.int16),
    FP8_E4M3: (torch.float8_e4m3fn, torch.uint8),
    FP8_E5M2: (torch.float8_e5m2, torch.uint8),
}
SMALL = tuple(_BITS)


@cache
def magnitudes(number_format: NumberFormat) -> list[float]:
    """Return all finite values that are not negative, ascending; index parity is that of bits."""
    dtype, integer = _BITS[number_format]
    positive = 1 << (15 if integer is torch.int16 else 7)
    values = torch.arange(positive).to(integer).view(dtype).double().tolist()
    return [value for value in values if value < float("inf")]


def step_at(value: float, number_format: NumberFormat) -> float:
    """Return the distance from the largest value not above |value| to the next one."""
    known = magnitudes(number_format)
    index = min(bisect_right(known, abs(value)) - 1, len(known) - 2)
    return known[index + 1] - known[index]


def nearest(value: float, number_format: NumberFormat) -> float:
    """Return a value rounded to nearest, ties to even."""
    known = magnitudes(number_format)
    index = bisect_left(known, abs(value))
    if index == len(known):
        return known[-1] if value > 0 else -known[-1]
    if known[index] != abs(value):
        below, above = abs(value) - known[index - 1], known[index] - abs(value)
        if below < above or (below == above and index % 2):
            index -= 1
    return known[index] if value > 0 else -known[index]
