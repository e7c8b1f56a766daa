"""MP116: Adam's epsilon is zero in FP16."""

import re
from collections.abc import Iterator

import numpy as np

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.interpret.values import FP16, ValueKind
from mp_agent.lint.rule import Problem, Rule
from mp_agent.lint.rules.facts import parameters_of

_OPTIMIZER = re.compile(r"\.(Adam|AdamW|NAdam|RAdam|Adamax|RMSprop)$")
_DEFAULT = 1e-8


def _find(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        match = _OPTIMIZER.search(operation.target)
        if match is None or operation.result.kind is not ValueKind.OPTIMIZER:
            continue
        epsilon = _epsilon(operation)
        if epsilon is None or float(np.float16(epsilon)) != 0.0:
            continue
        groups = list(parameters_of(operation.argument(0, "params")))
        if groups and all(group.dtypes == {FP16} for group in groups):
            yield Problem(
                operation.place,
                f"eps={epsilon:g} is 0 in the FP16 state of {match.group(1)}: a gradient of zero "
                "divides by zero, and the weight becomes NaN",
            )


def _epsilon(operation: Operation) -> float | None:
    value = operation.argument(3, "eps")
    if value is None:
        return _DEFAULT
    number = value.constant
    return float(number) if value.kind is ValueKind.CONSTANT and _is_number(number) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


ADAM_EPSILON = Rule(
    code="MP116",
    name="adam-epsilon",
    severity=FindingSeverity.ERROR,
    summary="Adam's epsilon is zero in its 16-bit state.",
    explanation="The smallest FP16 number is 6e-8, so the default of 1e-8 is rounded to 0 when "
    "the state has the FP16 of the parameters. Where the second moment is 0 too, the update is "
    "0/0. BF16 represents 1e-8.",
    bad="""\
import torch

model = torch.nn.Linear(64, 64, dtype=torch.float16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
""",
    good="""\
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
""",
    remedy="Keep FP32 weights and state; if both must be FP16, use an epsilon of 1e-4 or more.",
    alert="MpAgentLossNonFinite",
    find=_find,
)
