"""What a call does to the error that it reads."""

from mp_agent.compare.report.model import ErrorRole
from mp_agent.compare.report.tensor_error import TensorError

_FACTOR = 2.0
_NEGLIGIBLE = 1e-3
"""Of the format's own rounding error."""


def role_of(
    input_error: float,
    input_nonfinite: bool,
    output: TensorError,
    own: TensorError | None,
    unit_roundoff: float,
) -> ErrorRole:
    """Return the role of a call: errors are relative, L2.

    Where the output is not finite, the error begins at the call only if what it read was finite.
    Without its own error, an output error that is new is taken for one that begins.
    """
    if not output.elements:
        return ErrorRole.UNKNOWN
    if output.nonfinite_ratio > 0:
        if own is not None and own.nonfinite_ratio > 0:
            return ErrorRole.BEGINS
        return ErrorRole.HANDED_ON if input_nonfinite else ErrorRole.BEGINS
    made, total = own.relative_l2 if own else 0.0, output.relative_l2
    if total <= unit_roundoff * _NEGLIGIBLE and input_error <= unit_roundoff * _NEGLIGIBLE:
        return ErrorRole.HANDED_ON
    if made >= input_error / _FACTOR and made > 0:
        return ErrorRole.BEGINS
    if total > _FACTOR * input_error:
        return ErrorRole.AMPLIFIED if own is not None and input_error > 0 else ErrorRole.BEGINS
    return ErrorRole.REDUCED if total < input_error / _FACTOR else ErrorRole.HANDED_ON
