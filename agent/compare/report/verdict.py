"""Whether a candidate passes."""

from collections.abc import Sequence
from math import isfinite

from mp_agent.compare.report.model import Verdict
from mp_agent.compare.report.tensor_error import TensorError
from mp_agent.compare.report.text import percent, scientific


def verdict_of(
    outputs: Sequence[TensorError],
    losses: tuple[float | None, float | None],
    gradients_finite: bool,
    tolerance: float,
    failure: str = "",
) -> Verdict:
    """Return the verdict on what the model returned.

    losses: the reference's and the candidate's. It passes if the mean absolute difference of what
    the model returns is below the tolerance, and if outputs, loss and gradients of the parameters
    are finite wherever those of the reference are.
    """
    mean_abs = max((one.mean_abs for one in outputs), default=0.0)
    lost = max((one.nonfinite_ratio for one in outputs), default=0.0)
    reasons = []
    if failure:
        reasons.append(failure)
    if lost > 0:
        reasons.append(f"{percent(lost)} of the model's outputs are NaN or Inf")
    if mean_abs >= tolerance:
        reasons.append(f"mean absolute difference {scientific(mean_abs)} ≥ {tolerance:g}")
    reference, candidate = losses
    if reference is not None and not isfinite(reference):
        reasons.append("the loss of the reference is NaN or Inf")
    elif candidate is not None and not isfinite(candidate):
        reasons.append("the loss is NaN or Inf")
    if not gradients_finite:
        reasons.append("gradients of parameters are NaN or Inf")
    if not failure and not any(one.elements for one in outputs) and candidate is None:
        reasons.append("the model returned nothing to compare")
    return Verdict(passed=not reasons, reasons=tuple(reasons), mean_abs=mean_abs)
