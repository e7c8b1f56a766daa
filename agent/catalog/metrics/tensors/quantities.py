"""What is read from a row of a watched tensor; None where it has no such number."""

from collections.abc import Mapping
from math import ceil, isfinite, sqrt

from mp_agent.records.columns import TENSOR_EXPONENTS, exponent_column
from mp_agent.records.slice_ratio import index_of, ratio_of

Row = Mapping[str, float]


def mean(row: Row) -> float | None:
    """Return the mean of the finite elements."""
    finite = row.get("elements", 0.0) - row.get("nonfinite_elements", 0.0)
    return row["sum"] / finite if finite and "sum" in row else None


def norm(row: Row) -> float | None:
    """Return the L2 norm of the finite elements."""
    return sqrt(row["sum_squares"]) if "sum_squares" in row else None


def dynamic_range(row: Row) -> float | None:
    """Return the largest magnitude divided by the smallest that is not zero."""
    if "abs_max" not in row or "abs_min" not in row:
        return None
    found = row["abs_max"] / row["abs_min"]
    return found if isfinite(found) else None


def dynamic_range_p01(row: Row) -> float | None:
    """Return a bound on the largest magnitude divided by the first percentile of the non-zero ones.

    The percentile is the smallest magnitude that at least one in a hundred do not exceed. What is
    returned is never above the true ratio and at least half of it where the percentile is from
    2^-64 to below 2^31; otherwise it may be smaller. None where all elements are zero.
    """
    counts = [row.get(exponent_column(exponent), 0.0) for exponent in TENSOR_EXPONENTS]
    rank, so_far = ceil(sum(counts) / 100.0), 0.0
    if not rank or "abs_max" not in row:
        return None
    largest = row["abs_max"]
    for exponent, count in zip(TENSOR_EXPONENTS, counts, strict=True):
        so_far += count
        if so_far >= rank and exponent != TENSOR_EXPONENTS[-1]:
            found = largest / min(2.0 ** (exponent + 1), largest)
            return found if isfinite(found) else None
    return 1.0


def swallowed_share(row: Row) -> float | None:
    """Return the share of the sum of magnitudes that a running sum in the dtype does not get."""
    total = row.get("abs_sum", 0.0)
    return row["swallowed_sum"] / total if total and "swallowed_sum" in row else None


def swallowed_share_of_reduction(row: Row) -> float | None:
    """Return the same where the script sums the elements in their dtype."""
    return swallowed_share(row) if row.get("reduction") else None


def slice_imbalance(row: Row) -> float | None:
    """Return the largest range of a slice divided by the smallest that is not zero."""
    return ratio_of(row["range_ratio"]) if "range_ratio" in row else None


def worst_slice(row: Row) -> int | None:
    """Return the index of the slice whose range is farthest from the usual one."""
    return index_of(row["range_ratio"]) if "range_ratio" in row else None
