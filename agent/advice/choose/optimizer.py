"""Adam's epsilon and the norm to clip at, from measured gradients."""

from collections.abc import Sequence
from math import ceil, floor, inf, isfinite, log10
from statistics import median

from mp_agent.advice.choose.exponents import ExponentCounts

DEFAULT_EPSILON = 1e-8
_SHARE = 0.01
_MARGIN = 10.0
_SMALLEST = 1e-15


def adam_epsilon(gradients: ExponentCounts) -> tuple[float, str]:
    """Return epsilon, and why.

    Adam divides by sqrt(v) + epsilon, where sqrt(v) is about the magnitude of the gradient: an
    epsilon above it takes the update away. It is torch's default unless more than 1 % of the
    parameters' gradients are below that; then a tenth of those.
    """
    low = gradients.quantile(_SHARE)
    if low >= DEFAULT_EPSILON:
        found = "no gradient is above zero" if low == inf else f"99 % of them are above {low:.1e}"
        return DEFAULT_EPSILON, (
            f"torch's default: the gradients that are not zero are larger ({found}), and it is "
            "above zero in the FP32 and BF16 state of Adam (in FP16 it would be 0)"
        )
    epsilon = max(_SMALLEST, 10.0 ** floor(log10(low / _MARGIN)))
    return epsilon, (
        f"1 % of the gradients that are not zero are below {2 * low:.1e}: torch's default of "
        f"{DEFAULT_EPSILON:g} would outweigh sqrt(v) there and take their updates away"
    )


def clip_norm(norms: Sequence[float], goal: str) -> tuple[float | None, str]:
    """Return the norm to clip at, and why; None where no norm is above zero.

    The largest measured one, rounded up to two digits: it clips none of the measured steps. For
    stability the median: it clips about half of them.
    """
    known = [norm for norm in norms if isfinite(norm) and norm > 0]
    if not known:
        return None, "no measured gradient norm is above zero"
    if goal == "stability":
        return rounded_up(median(known)), (
            f"the median of {len(known)} measured norms ({min(known):.3g} to {max(known):.3g}): "
            "bounds every update to the usual size"
        )
    return rounded_up(max(known)), (
        f"the largest of {len(known)} measured norms ({min(known):.3g} to {max(known):.3g}): "
        "clips spikes, and none of the measured steps"
    )


def rounded_up(value: float) -> float:
    """Return a positive number rounded up to two significant digits."""
    digits = 1 - floor(log10(value))
    scaled = ceil(value * 10.0**digits - 1e-9)
    return float(f"{scaled}e{-digits}")
