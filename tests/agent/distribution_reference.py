"""The columns of the gradients' distribution, by numpy's own FP16, in float64 and math.fsum."""

from collections.abc import Sequence
from math import frexp, fsum, isfinite, nan
from sys import float_info

import numpy as np

from mp_agent.records.columns import DISTRIBUTION, EXPONENTS, exponent_column


def distribution_reference(
    unscaled: Sequence[float], loss_scale: float | None = None
) -> dict[str, float]:
    """Return every column by name, NaN where there is none."""
    row = dict.fromkeys(DISTRIBUTION.names, nan)
    finite = [value for value in unscaled if isfinite(value)]
    nonzero = [abs(value) for value in finite if value != 0.0]
    row["elements"] = float(len(unscaled))
    row["nonfinite_elements"] = float(len(unscaled) - len(finite))
    row["sum"] = _bounded_sum(finite)
    row["sum_squares"] = _bounded_sum([value * value for value in finite])
    row["nonzero_elements"] = float(len(nonzero))
    for exponent in EXPONENTS:
        row[exponent_column(exponent)] = 0.0
    for value in nonzero:
        bins = [exponent for exponent in EXPONENTS if exponent < frexp(value)[1]]
        row[exponent_column(bins[-1] if bins else EXPONENTS[0])] += 1.0
    if loss_scale is None or not isfinite(loss_scale):
        return row
    halves = {factor: _fp16(nonzero, loss_scale * factor) for factor in (0.5, 1.0, 2.0)}
    now = halves[1.0]
    row["fp16_elements"] = float(len(nonzero))
    row["flushed_elements"] = float((now == 0.0).sum())
    row["flushed_at_half_elements"] = float((halves[0.5] == 0.0).sum())
    row["flushed_at_double_elements"] = float((halves[2.0] == 0.0).sum())
    row["subnormal_elements"] = float(((now > 0.0) & (now < 2.0**-14)).sum())
    row["near_overflow_elements"] = float(sum(value * loss_scale > 60000.0 for value in nonzero))
    row["overflow_at_double_elements"] = float(np.isinf(halves[2.0]).sum())
    return row


def _bounded_sum(values: Sequence[float]) -> float:
    """Return a sum, float64's largest number where it is beyond that."""
    factor = 2.0**-64 if any(abs(value) > 1.0 for value in values) else 1.0
    total = fsum(value * factor for value in values) / factor
    return max(-float_info.max, min(total, float_info.max))


def _fp16(magnitudes: Sequence[float], scale: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (np.array(magnitudes, dtype=np.float64) * scale).astype(np.float16)
