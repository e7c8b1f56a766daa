"""How much a loss that a precision changes means for the quality of the model."""

from math import isfinite

from mp_agent.report.numbers import percent

FINE_RATIO, BAD_RATIO = 0.01, 0.05


def quality_grade(difference: float) -> str:
    """Return `fine`, `noticeable` or `bad` for a relative difference of the loss."""
    if difference <= FINE_RATIO:
        return "fine"
    return "noticeable" if difference <= BAD_RATIO else "bad"


def graded_loss(reference: float | None, loss: float | None) -> str:
    """Return in brackets by how much a loss differs, and what that means; "" if not known."""
    if reference is None or loss is None or not isfinite(reference) or not isfinite(loss):
        return ""
    if reference == 0.0:
        return "" if loss else f" ({percent(0.0)}: fine)"
    difference = abs(loss - reference) / abs(reference)
    return f" ({percent(difference)}: {quality_grade(difference)})"
