"""MP114: reductions whose result has 16 bits."""

import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.externals import asked_dtypes
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.interpret.values import SIXTEEN_BITS, Value, ValueKind
from mp_agent.lint.rule import Problem, Rule

_NAMES = r"(sum|mean|norm|var|std|cumsum|prod|cumprod|nansum|nanmean)"
_TARGET = re.compile(
    rf"^(?:torch\.{_NAMES}|<tensor>\.{_NAMES}|torch\.linalg\.(?:vector_norm|norm|matrix_norm))$"
)
_FP32_UNDER_AUTOCAST = re.compile(r"(sum|norm|prod)$")


def _find(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        if _TARGET.match(operation.target) is None:
            continue
        asked = asked_dtypes(operation.keywords)
        dtypes = asked if "dtype" in operation.keywords else _operand(operation).dtypes
        if not dtypes or not dtypes <= SIXTEEN_BITS:
            continue
        widened = operation.autocast is not None and not asked
        if widened and _FP32_UNDER_AUTOCAST.search(operation.target):
            continue
        if _operand(operation).kind is ValueKind.ARRAY:
            continue
        yield Problem(
            operation.place,
            f"a reduction in {'/'.join(sorted(dtypes))}: the result overflows, or drops what is "
            "small against it",
        )


def _operand(operation: Operation) -> Value:
    if operation.target.startswith("<"):
        return operation.receiver
    return operation.argument(0, "input") or operation.receiver


LOW_PRECISION_REDUCTION = Rule(
    code="MP114",
    name="low-precision-reduction",
    severity=FindingSeverity.WARNING,
    summary="A sum, mean, norm or variance has 16 bits.",
    explanation="A sum of 65 505 ones is Inf in FP16. In BF16 a sum of 256 ones and one more is "
    "256: its spacing is 2 from there on. Kernels add up in FP32, but the result is rounded to "
    "the dtype asked for, and partial results on the way across ranks and blocks are, too. "
    "Autocast runs sums, products and norms in FP32; those are not reported.",
    bad="""\
import torch


def total(x: torch.Tensor) -> torch.Tensor:
    return x.half().sum()
""",
    good="""\
import torch


def total(x: torch.Tensor) -> torch.Tensor:
    return x.half().sum(dtype=torch.float32)
""",
    remedy="Reduce in FP32: `x.float().sum()` or `x.sum(dtype=torch.float32)`.",
    alert="MpAgentLossNonFinite",
    find=_find,
)
