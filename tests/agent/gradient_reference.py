"""What gradient statistics ought to be, computed with numpy in float64 and exact summation.

The only place among the tests where a statistic is worked out; a new column gets its line here.
"""

from math import fsum

import numpy as np
import numpy.typing as npt

from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENTS

FLOAT64_MAX = float(np.finfo(np.float64).max)
EXACT_SUM_ELEMENTS = 300_000
"""Beyond this numpy's pairwise float64 sum, good to 1e-15, stands in for `math.fsum`."""

TOLERANCES = {"sum_squares": 1e-6, "abs_max": 1e-15, "abs_min": 1e-15, "abs_sum": 1e-6}
"""Relative ones of what kernels measure; all other columns are counts, and exact."""


def reference_columns(
    elements: npt.NDArray[np.float64], inverse_scale: float = 1.0
) -> dict[str, float]:
    """Return the columns of some elements, unscaled, by name."""
    finite = elements[np.isfinite(elements)] * inverse_scale
    with np.errstate(over="ignore", under="ignore"):
        squares = np.square(finite)
    return {
        "sum_squares": _sum(squares),
        "abs_max": float(np.abs(finite).max(initial=0.0)),
        "zero_elements": float(np.count_nonzero(elements == 0.0)),
        "nan_elements": float(np.count_nonzero(np.isnan(elements))),
        "inf_elements": float(np.count_nonzero(np.isinf(elements))),
        "elements": float(elements.size),
        "abs_min": float(np.abs(finite[finite != 0.0]).min(initial=np.inf))
        if np.count_nonzero(finite)
        else np.nan,
        "abs_sum": _sum(np.abs(finite)),
    }


def reference_row(
    elements: npt.NDArray[np.float64], inverse_scale: float = 1.0
) -> npt.NDArray[np.float64]:
    """Return the columns in the order in which the probe writes them."""
    found = reference_columns(elements, inverse_scale)
    return np.array([found[name] for name in GRADIENT_COLUMN_NAMES])


def reference_total(row_C: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return a row as the totals of a step have it."""
    total_C = row_C.copy()
    total_C[GRADIENTS.totals :] = np.nan
    return total_C


def reference_union(rows_LC: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the columns of all elements behind several rows of layers."""
    total_C: npt.NDArray[np.float64] = rows_LC.sum(axis=0)
    for name, extreme in (("abs_max", np.fmax), ("abs_min", np.fmin)):
        column = GRADIENT_COLUMN_NAMES.index(name)
        total_C[column] = extreme.reduce(rows_LC[:, column])
    return total_C


def _sum(terms: npt.NDArray[np.float64]) -> float:
    if not np.isfinite(terms).all():
        return FLOAT64_MAX
    try:
        total = fsum(terms) if terms.size <= EXACT_SUM_ELEMENTS else float(terms.sum())
    except OverflowError:
        return FLOAT64_MAX
    return min(total, FLOAT64_MAX)
