"""MP103: the loss is computed after autocast has ended."""

import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.rule import Problem, Rule
from mp_agent.lint.rules.facts import backwards, text_of

_LOSS = re.compile(r"^torch\.nn\.functional\.(\w*_loss|\w*cross_entropy\w*|kl_div)$")


def _find(trace: Trace) -> Iterator[Problem]:
    passes = list(backwards(trace))
    for operation in trace.operations:
        if (
            _is_loss(operation)
            and operation.autocast is None
            and not operation.no_grad
            and operation.arguments
            and operation.arguments[0].from_autocast
            and any(operation.compatible(backward) for backward in passes)
        ):
            yield Problem(
                operation.place,
                f"`{text_of(operation)}` runs outside autocast on an output that autocast made: "
                "it is computed in the output's 16 bits",
            )


def _is_loss(operation: Operation) -> bool:
    return operation.target == "<loss>()" or _LOSS.match(operation.target) is not None


LOSS_OUTSIDE_AUTOCAST = Rule(
    code="MP103",
    name="loss-outside-autocast",
    severity=FindingSeverity.WARNING,
    summary="The loss is computed after autocast has ended.",
    explanation="Autocast runs losses in FP32. Outside of it, the loss takes the dtype of the "
    "model's output, 16 bits as a rule: its sum can overflow, and small differences vanish. "
    "Losses of an output that was made FP32 (`output.float()`) are not reported.",
    bad="""\
import torch


def step(model, criterion, x, y, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(x)
    loss = criterion(output, y)
    loss.backward()
    optimizer.step()
""",
    good="""\
import torch


def step(model, criterion, x, y, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(x)
        loss = criterion(output, y)
    loss.backward()
    optimizer.step()
""",
    remedy="Move the loss into the with-block, or pass `output.float()`.",
    alert="MpAgentLossNonFinite",
    find=_find,
)
