"""Mean, standard deviation and shares of a row of activations."""

from collections.abc import Mapping
from math import isfinite, sqrt

Row = Mapping[str, float]


def nonfinite_elements(row: Row) -> float:
    """Return the NaN and Inf elements of a row together."""
    return row.get("nan_elements", 0.0) + row.get("inf_elements", 0.0)


def mean(row: Row) -> float | None:
    """Return the mean of the finite elements; None without any."""
    elements = _finite_elements(row)
    return row["sum"] / elements if elements and "sum" in row else None


def standard_deviation(row: Row) -> float | None:
    """Return the standard deviation of the finite elements; None beyond float64, or without any.

    Of squares in float64: right to eight digits where it is at least 1/10 000 of the mean.
    """
    elements, center = _finite_elements(row), mean(row)
    if not elements or center is None or "sum_squares" not in row:
        return None
    variance = row["sum_squares"] / elements - center * center
    return sqrt(max(0.0, variance)) if isfinite(variance) else None


def zero_share(row: Row) -> float | None:
    """Return the share of the elements that are zero."""
    elements = row.get("elements", 0.0)
    return row.get("zero_elements", 0.0) / elements if elements else None


def _finite_elements(row: Row) -> float:
    return row.get("elements", 0.0) - nonfinite_elements(row)
