"""MP113: variance as E[x²] − E[x]²."""

from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Trace
from mp_agent.lint.interpret.values import FP64
from mp_agent.lint.rule import Problem, Rule


def _find(trace: Trace) -> Iterator[Problem]:
    for operation in trace.of("<subtract>"):
        if "torch" not in operation.place.module.identifiers:
            continue  # NumPy's double precision
        left, right = operation.receiver.form, operation.arguments[0].form
        if left is None or right is None or left[1] != right[1]:
            continue
        wide = FP64 in operation.receiver.dtypes | operation.arguments[0].dtypes
        if (left[0], right[0]) == ("mean of square", "square of mean") and not wide:
            yield Problem(
                operation.place,
                "variance as E[x²] − E[x]² cancels: with a mean far from zero the result is noise, "
                "and may be negative",
            )


CANCELLING_VARIANCE = Rule(
    code="MP113",
    name="cancelling-variance",
    severity=FindingSeverity.WARNING,
    summary="Variance is computed as E[x²] − E[x]².",
    explanation="Both terms are about E[x]²; their difference keeps only the digits in which they "
    "differ. With 11 bits (FP16) or 8 bits (BF16) nothing is left once the mean is 32 (or 11) "
    "standard deviations from zero; FP32 reaches that at about 3000. A negative result becomes "
    "NaN in the square root. Double precision is not reported.",
    bad="""\
import torch


def variance(x: torch.Tensor) -> torch.Tensor:
    return (x**2).mean(-1) - x.mean(-1) ** 2
""",
    good="""\
import torch


def variance(x: torch.Tensor) -> torch.Tensor:
    return x.float().var(-1, correction=0)
""",
    remedy="Use `x.float().var(correction=0)`, or average `(x - x.mean()) ** 2`; over several "
    "parts, merge by Welford's (Chan's) formula.",
    alert="MpAgentLossNonFinite",
    find=_find,
)
