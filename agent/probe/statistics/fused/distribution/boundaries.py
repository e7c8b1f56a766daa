"""What the kernels count of a distribution: magnitudes at or beyond each of some boundaries.

Every count of `DISTRIBUTION` is a difference of two such counts. A magnitude grows with its bits,
so a boundary is, for given scales, one float32 in whose place `find_edges` puts its bits.
"""

from math import inf, nextafter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mp_agent.probe.statistics.distribution import (
    INFINITE_FROM,
    NEAR_OVERFLOW,
    OF_FP16,
    SUBNORMAL_BELOW,
    ZERO_UP_TO,
)
from mp_agent.records.columns import DISTRIBUTION, EXPONENTS, exponent_column


class Boundary(NamedTuple):
    """A magnitude is at or beyond it from `least` on."""

    least: float
    loss_scaled: bool = False
    """Whether it is the unscaled magnitude times the loss scale of the step that is compared."""


def _above(value: float) -> float:
    return nextafter(value, inf)


_BOUNDARIES = {
    "all": Boundary(0.0),
    "nonzero": Boundary(_above(0.0)),
    **{exponent_column(exponent): Boundary(2.0**exponent) for exponent in EXPONENTS[1:]},
    "nonfinite": Boundary(inf),
    "not_flushed": Boundary(_above(ZERO_UP_TO), loss_scaled=True),
    "not_flushed_at_half": Boundary(_above(2.0 * ZERO_UP_TO), loss_scaled=True),
    "not_flushed_at_double": Boundary(_above(0.5 * ZERO_UP_TO), loss_scaled=True),
    "normal": Boundary(SUBNORMAL_BELOW, loss_scaled=True),
    "near_overflow": Boundary(_above(NEAR_OVERFLOW), loss_scaled=True),
    "overflow_at_double": Boundary(0.5 * INFINITE_FROM, loss_scaled=True),
}
BOUNDARIES = len(_BOUNDARIES)
NONFINITE = list(_BOUNDARIES).index("nonfinite")
"""Beyond it are the elements whose unscaled magnitudes are not finite: beyond all others too."""

_STARTS_OF_BINS = ("nonzero", *map(exponent_column, EXPONENTS[1:]), "nonfinite")

_FROM_AND_BELOW = {
    "elements": ("all", None),
    "nonfinite_elements": ("nonfinite", None),
    "nonzero_elements": ("nonzero", "nonfinite"),
    "fp16_elements": ("nonzero", "nonfinite"),
    "flushed_elements": ("nonzero", "not_flushed"),
    "flushed_at_half_elements": ("nonzero", "not_flushed_at_half"),
    "flushed_at_double_elements": ("nonzero", "not_flushed_at_double"),
    "subnormal_elements": ("not_flushed", "normal"),
    "near_overflow_elements": ("near_overflow", "nonfinite"),
    "overflow_at_double_elements": ("overflow_at_double", "nonfinite"),
    **{
        exponent_column(exponent): (_STARTS_OF_BINS[number], _STARTS_OF_BINS[number + 1])
        for number, exponent in enumerate(EXPONENTS)
    },
}

COLUMNS = ("sum", "sum_squares", *_FROM_AND_BELOW)
"""What the kernels write; all columns of `DISTRIBUTION` have to be among them."""

SPAN_FIELDS = 3
"""int32 of a column, see `span_table`."""

SUMS = 2
"""float64 of a chunk: sum, sum of squares."""


def boundary_table() -> npt.NDArray[np.float64]:
    """Return [boundaries, 2]: the least number at or beyond it, 1 where that is loss-scaled."""
    return np.array(list(_BOUNDARIES.values()), dtype=np.float64)


def span_table() -> npt.NDArray[np.int32]:
    """Return [columns, SPAN_FIELDS], in the order of `DISTRIBUTION`.

    Numbers of the boundaries from which on, and below which, a column counts, -1 for none (both
    for no count); 1 where there is no value without a loss scale.
    """
    numbers = {name: number for number, name in enumerate(_BOUNDARIES)}
    spans = [_FROM_AND_BELOW.get(name, (None, None)) for name in DISTRIBUTION.names]
    return np.array(
        [
            (*(-1 if each is None else numbers[each] for each in span), name in OF_FP16)
            for name, span in zip(DISTRIBUTION.names, spans, strict=True)
        ],
        dtype=np.int32,
    )
