"""The columns of the optimizer's family, written as plainly as can be, in float64 and math.fsum."""

from collections.abc import Mapping, Sequence
from math import fsum, isfinite, nan, sqrt

from mp_agent.records.columns import OPTIMIZER

Numbers = Sequence[float]

SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}


def update_reference(
    after: Numbers,
    before: Numbers | None = None,
    gradient: Numbers | None = None,
    momentum: Numbers | None = None,
    moment: Numbers | None = None,
    divisor: Numbers | None = None,
    *,
    weight_bytes: int = 4,
    moment_format: str = "float32",
    learning_rate: float | None = None,
    correction: float = 1.0,
    epsilon: float | None = None,
) -> dict[str, float]:
    """Return every column by name, NaN where there is none."""
    row = dict.fromkeys(OPTIMIZER.names, nan)
    finite = [w for w in after if isfinite(w)]
    row["elements"] = float(len(after))
    row["weight_sum_squares"] = fsum(w * w for w in finite)
    row["nonfinite_weights"] = float(len(after) - len(finite))
    if learning_rate is not None:
        row["learning_rate"] = row["learning_rate_min"] = learning_rate
    if before is not None:
        pairs = [
            (i, a, b)
            for i, (a, b) in enumerate(zip(after, before, strict=True))
            if isfinite(a) and isfinite(b)
        ]
        row["compared_elements"] = float(len(pairs))
        row["compared_sum_squares"] = fsum(b * b for _, _, b in pairs)
        row["update_sum_squares"] = fsum((a - b) ** 2 for _, a, b in pairs)
        if weight_bytes <= 2 and (gradient is not None or momentum is not None):
            due = [
                (a, b)
                for i, a, b in pairs
                if learning_rate != 0.0 and (_at(gradient, i) != 0.0 or _at(momentum, i) != 0.0)
            ]
            row["rounded_elements"] = float(len(due))
            row["lost_updates"] = float(sum(a == b for a, b in due))
    if moment is not None:
        row |= _moments(gradient, momentum, moment, divisor, moment_format, correction, epsilon)
    return row


def _moments(
    gradient: Numbers | None,
    momentum: Numbers | None,
    moment: Numbers,
    divisor: Numbers | None,
    moment_format: str,
    correction: float,
    epsilon: float | None,
) -> Mapping[str, float]:
    row = {"moment_elements": float(len(moment))}
    if epsilon is None:
        return row
    below, active, ratios = 0, 0, []
    for i, v in enumerate(moment):
        g, m = _at(gradient, i), _at(momentum, i)
        if not (isfinite(g) and isfinite(m) and isfinite(v)) or g == m == v == 0.0:
            continue
        active += 1
        used = v if divisor is None else divisor[i]
        below += sqrt(used / correction) < epsilon
        if gradient is not None:
            ratios.append(g * g / max(v / correction, epsilon**2))
    row["active_elements"] = float(active)
    row["below_epsilon_elements"] = float(below)
    lost = 0.0 < epsilon < SMALLEST[moment_format]
    row["lost_epsilon_elements"] = len(moment) * float(lost)
    if gradient is not None:
        row["squared_ratio_sum"] = fsum(ratios)
    return row


def _at(numbers: Numbers | None, index: int) -> float:
    return 0.0 if numbers is None else numbers[index]
