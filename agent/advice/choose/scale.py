"""The initial loss scale, from the exponents of measured gradients."""

from math import floor, log2

from mp_agent.advice.choose.exponents import FP16_LARGEST, ExponentCounts

HEADROOM = 4.0
"""Factor by which gradients may grow after the measured steps before they overflow."""
LARGEST = 2.0**24
"""Beyond it, nothing that FP16 loses matters next to the rounding of FP32 sums."""
LOST_MAX = 0.05
"""Share of lost gradients from which FP16 is not recommended; CLIP lost 5 to 20 % in FP16."""


def initial_scale(gradients: ExponentCounts) -> float:
    """Return the largest power of two at which no gradient overflows, with `HEADROOM`.

    gradients: of parameters and of module outputs, in FP32, unscaled. Between 2^-14, below which
    FP16 holds none of them, and `LARGEST`.
    """
    if gradients.abs_max <= 0:
        return LARGEST
    power = floor(log2(FP16_LARGEST / HEADROOM / gradients.abs_max))
    return float(min(LARGEST, max(2.0**-14, 2.0**power)))
