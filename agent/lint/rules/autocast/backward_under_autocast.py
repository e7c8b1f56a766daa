"""MP105: backward under autocast."""

from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Trace
from mp_agent.lint.rule import Problem, Rule
from mp_agent.lint.rules.facts import backwards


def _find(trace: Trace) -> Iterator[Problem]:
    for operation in backwards(trace):
        if operation.autocast is not None:
            yield Problem(
                operation.place,
                "backward runs under autocast: its operations take the dtypes of their forward "
                "counterparts by themselves, and others are cast a second time",
            )


BACKWARD_UNDER_AUTOCAST = Rule(
    code="MP105",
    name="backward-under-autocast",
    severity=FindingSeverity.WARNING,
    summary="`backward()` is called under autocast.",
    explanation="Backward operations run in the dtype that autocast chose for their forward "
    "operation; PyTorch advises against backward within the block. What backward computes again "
    "there, such as custom functions, hooks and FP32 gradients, is cast to 16 bits, where "
    "small gradients underflow.",
    bad="""\
import torch


def step(model, x, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
        loss.backward()
    optimizer.step()
""",
    good="""\
import torch


def step(model, x, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
    loss.backward()
    optimizer.step()
""",
    remedy="End the with-block before `backward()`.",
    alert="MpAgentGradientUnderflow",
    find=_find,
)
