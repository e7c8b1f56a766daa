"""What is read from columns of the gradients' distribution, of a run, layer or collection alike."""

from math import sqrt

from mp_agent.catalog.metrics.optimizer.quantities import Columns, Quantity, share


def mean(values: Columns) -> float | None:
    """Return the mean of the elements."""
    return share(values, "sum", "elements")


def deviation(values: Columns) -> float | None:
    """Return the standard deviation of the elements."""
    average, squares = mean(values), share(values, "sum_squares", "elements")
    if average is None or squares is None:
        return None
    return sqrt(max(0.0, squares - average * average))


def of_fp16(column: str) -> Quantity:
    """Return what reads the share of the non-zero elements that a column counts."""
    return lambda values: share(values, column, "fp16_elements")
