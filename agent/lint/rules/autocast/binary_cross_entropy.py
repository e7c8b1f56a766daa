"""MP104: binary cross entropy of probabilities under autocast."""

import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.rule import Problem, Rule

_FUNCTION = "torch.nn.functional.binary_cross_entropy"
_MODULE = re.compile(r"^torch\.nn\.(\w+\.)*BCELoss$")


def _find(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        if operation.autocast is not None and _is_unsafe(operation):
            device = operation.autocast.name
            if "cpu" not in device:
                yield Problem(
                    operation.place,
                    "binary cross entropy of probabilities raises RuntimeError under autocast on "
                    "CUDA: use the form with logits",
                )


def _is_unsafe(operation: Operation) -> bool:
    if operation.target == "<loss>()":
        return _MODULE.match(operation.receiver.name) is not None
    return operation.target == _FUNCTION


BINARY_CROSS_ENTROPY = Rule(
    code="MP104",
    name="binary-cross-entropy-under-autocast",
    severity=FindingSeverity.ERROR,
    summary="Binary cross entropy of probabilities is computed under autocast.",
    explanation="The backward pass of `binary_cross_entropy` and `BCELoss` has gradients that "
    "FP16 cannot represent, so PyTorch refuses both under autocast on CUDA. The form with logits "
    "combines the sigmoid and the loss, and is safe.",
    bad="""\
import torch
import torch.nn.functional as F


def compute_loss(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        return F.binary_cross_entropy(torch.sigmoid(model(x)), y)
""",
    good="""\
import torch
import torch.nn.functional as F


def compute_loss(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        return F.binary_cross_entropy_with_logits(model(x), y)
""",
    remedy="Use `binary_cross_entropy_with_logits` or `BCEWithLogitsLoss` on the output before "
    "the sigmoid; or leave autocast (`torch.autocast(..., enabled=False)`) and pass FP32.",
    alert="MpAgentRunFailed",
    find=_find,
)
