"""What is read from the columns of log-probabilities."""

from collections.abc import Mapping
from math import ceil, sqrt

from mp_agent.records.columns import DELTA_EDGES, delta_column

Columns = Mapping[str, float]

_SIGNIFICANT_VARIANCE = 1e-9
"""Share of the mean square from which a variance is more than the rounding of its sums."""


def k1(row: Columns) -> float | None:
    """Return the mean of the sampler's less the trainer's log-probability."""
    mean = _mean(row, "delta_sum")
    return None if mean is None else 0.0 - mean


def k3(row: Columns) -> float | None:
    """Return the mean of exp(Δ) - 1 - Δ."""
    return _mean(row, "k3_sum")


def delta_quantile(row: Columns, quantile: float) -> float | None:
    """Return a bound on a quantile of |Δ|, by the bin that it is in; None without tokens.

    The quantile is the smallest |Δ| that at least this share of the tokens do not exceed. What is
    returned is never below it, and at most 2^(1/4), 19 %, above; where it is less than 2^-14 or
    more than 64, at most 2^-14 or the largest |Δ|.
    """
    tokens, largest = row.get("tokens", 0.0), row.get("delta_abs_max")
    if tokens <= 0.0 or largest is None:
        return None
    rank, so_far = ceil(quantile * tokens), 0.0
    for place, edge in enumerate(DELTA_EDGES):
        so_far += row.get(delta_column(place), 0.0)
        if so_far >= rank:
            return min(edge, largest)
    return largest


def correlation(row: Columns) -> float | None:
    """Return Pearson's correlation of the two log-probabilities, -1 to 1.

    From the moments of the trainer's and of Δ, so that a correlation close to 1 is exact. None
    where a standard deviation is below 1/30 000 of the root mean square: it may be rounding then.
    """
    tokens = row.get("tokens", 0.0)
    if tokens <= 0.0:
        return None
    mean, mean_delta = row["trainer_sum"] / tokens, row["delta_sum"] / tokens
    squares, squares_delta = row["trainer_sum_squares"] / tokens, row["delta_sum_squares"] / tokens
    products = row["trainer_delta_sum"] / tokens
    trainer = squares - mean * mean
    delta = squares_delta - mean_delta * mean_delta
    trainer_delta = products - mean * mean_delta
    sampler = trainer - 2.0 * trainer_delta + delta
    squares_sampler = squares - 2.0 * products + squares_delta
    if trainer <= _SIGNIFICANT_VARIANCE * squares:
        return None
    if sampler <= _SIGNIFICANT_VARIANCE * max(squares, squares_delta, squares_sampler):
        return None
    # Divided first: of equal ones the result is exactly 1.
    found = ((trainer - trainer_delta) / trainer) / sqrt(sampler / trainer)
    return min(max(found, -1.0), 1.0)


def effective_samples(row: Columns) -> float | None:
    """Return (sum w)² / sum w² of the weights w = exp(Δ), divided by the number of tokens."""
    tokens, squares = row.get("tokens", 0.0), row.get("weight_sum_squares", 0.0)
    if tokens <= 0.0 or squares <= 0.0:
        return None
    total = row["weight_sum"]
    return min(1.0, (total / squares) * (total / tokens))


def _mean(row: Columns, column: str) -> float | None:
    tokens = row.get("tokens", 0.0)
    return row[column] / tokens if tokens > 0.0 and column in row else None
