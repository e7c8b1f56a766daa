"""What is read from the columns of the optimizer, of a run and of a layer alike."""

from collections.abc import Callable, Mapping
from math import sqrt

Columns = Mapping[str, float]
Quantity = Callable[[Columns], float | None]


def weight_norm(values: Columns) -> float | None:
    """Return the L2 norm of the weights."""
    squares = values.get("weight_sum_squares")
    return None if squares is None else sqrt(squares)


def relative_update(values: Columns) -> float | None:
    """Return the norm of the update divided by that of the weights; None where these are zero."""
    squares = values.get("compared_sum_squares", 0.0)
    return sqrt(values.get("update_sum_squares", 0.0) / squares) if squares > 0.0 else None


def lost_updates(values: Columns) -> float | None:
    """Return the share of the updates of 16-bit weights that rounding swallowed."""
    return share(values, "lost_updates", "rounded_elements")


def moment_rms(values: Columns) -> float | None:
    """Return the root of the mean of g²/v over the active elements."""
    active = values.get("active_elements", 0.0)
    total = values.get("squared_ratio_sum")
    return None if total is None or active <= 0.0 else sqrt(total / active)


def share(values: Columns, part: str, whole: str) -> float | None:
    """Return one column divided by another; None where there is nothing to divide by."""
    elements = values.get(whole, 0.0)
    return values.get(part, 0.0) / elements if elements > 0.0 else None
