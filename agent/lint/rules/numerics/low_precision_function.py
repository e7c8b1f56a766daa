"""MP115: exp, log, pow and softmax in 16 bits."""

import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.externals import asked_dtypes
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.interpret.values import SIXTEEN_BITS, Value, ValueKind
from mp_agent.lint.rule import Problem, Rule

_NAMES = r"(?:exp|exp2|expm1|log|log2|log10|log1p|pow|softmax|log_softmax|logsumexp|cosh|sinh)"
_TARGET = re.compile(
    rf"^(?:torch\.(?:special\.|nn\.functional\.)?({_NAMES})|<tensor>\.({_NAMES}))$"
)
_MODULE = re.compile(r"^torch\.nn\.(?:\w+\.)*(?:Log)?Softmax$")


def _find(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        name = _function(operation)
        if name is None:
            continue
        asked = asked_dtypes(operation.keywords)
        operand = _operand(operation)
        dtypes = asked if "dtype" in operation.keywords else operand.dtypes
        if operation.autocast is not None and not asked:
            continue
        if dtypes and dtypes <= SIXTEEN_BITS and operand.kind is not ValueKind.ARRAY:
            yield Problem(
                operation.place,
                f"{name} in {'/'.join(sorted(dtypes))}: its range or its digits do not suffice",
            )


def _function(operation: Operation) -> str | None:
    if operation.target == "<model>()" and _MODULE.match(operation.receiver.name):
        return "softmax"
    match = _TARGET.match(operation.target)
    return None if match is None else match.group(1) or match.group(2)


def _operand(operation: Operation) -> Value:
    if operation.target.startswith("<tensor>"):
        return operation.receiver
    return operation.argument(0, "input") or operation.receiver


LOW_PRECISION_FUNCTION = Rule(
    code="MP115",
    name="low-precision-function",
    severity=FindingSeverity.WARNING,
    summary="exp, log, pow or softmax is computed in 16 bits.",
    explanation="`exp(11.1)` is Inf in FP16, `log` of what was rounded to zero is −Inf, `pow` "
    "leaves the range quickly, and probabilities below 6e-8 become zero. BF16 keeps the range but "
    "only two or three digits. Autocast runs all of them in FP32; those are not reported.",
    bad="""\
import torch


def attention(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores.half(), dim=-1)
""",
    good="""\
import torch


def attention(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores.half(), dim=-1, dtype=torch.float32)
""",
    remedy="Compute in FP32 (`.float()`, `dtype=torch.float32`) and cast the result, or leave the "
    "choice to autocast.",
    alert="MpAgentLossNonFinite",
    find=_find,
)
