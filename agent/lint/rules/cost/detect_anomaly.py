"""MP118: detect_anomaly is left on."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import Edit, FindingSeverity
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.interpret.values import ValueKind
from mp_agent.lint.rule import Problem, Rule

_SET = re.compile(r"^torch\.autograd\.(anomaly_mode\.)?set_detect_anomaly$")
_CONTEXT = re.compile(r"^torch\.autograd\.(anomaly_mode\.)?detect_anomaly$")
_TRAINER = re.compile(r"^(lightning|pytorch_lightning)(\.\w+)*\.Trainer$")


def _find(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        if _is_on(operation) and not operation.path:
            yield Problem(
                operation.place,
                "anomaly detection is always on: it ends the run at the first Inf or NaN in a "
                "backward pass, which loss scaling expects now and then, and slows every step",
                _edits(operation),
            )


def _is_on(operation: Operation) -> bool:
    check_nan = operation.keywords.get("check_nan")
    if check_nan is not None and check_nan.constant is False:
        return False  # records stack traces, ends nothing
    if _CONTEXT.match(operation.target):
        return True
    if _SET.match(operation.target):
        mode = operation.argument(0, "mode")
    elif _TRAINER.match(operation.target):
        mode = operation.keywords.get("detect_anomaly")
    else:
        return False
    return mode is not None and mode.kind is ValueKind.CONSTANT and mode.constant is True


def _edits(operation: Operation) -> tuple[Edit, ...]:
    """Turn a literal True into False."""
    node, source = operation.place.node, operation.place.module.source
    if not isinstance(node, ast.Call) or _CONTEXT.match(operation.target):
        return ()
    wanted = ("mode", "detect_anomaly")
    given = [keyword.value for keyword in node.keywords if keyword.arg in wanted]
    given += node.args[:1] if _SET.match(operation.target) else []
    literal = [one for one in given if isinstance(one, ast.Constant) and one.value is True]
    return tuple(Edit(source.span(one), "False") for one in literal)


DETECT_ANOMALY = Rule(
    code="MP118",
    name="detect-anomaly",
    severity=FindingSeverity.WARNING,
    summary="Anomaly detection of autograd is left on.",
    explanation="`detect_anomaly` records a stack trace per operation and checks every gradient, "
    "and raises RuntimeError at the first NaN of a backward pass. Under dynamic loss scaling an "
    "overflow now and then is normal: the scaler skips that step. Anomaly detection ends the run "
    "instead. Uses under a condition are not reported.",
    bad="""\
import torch

torch.autograd.set_detect_anomaly(True)
""",
    good="""\
import os

import torch

torch.autograd.set_detect_anomaly(os.environ.get("DEBUG") == "1")
""",
    remedy="Remove it, or switch it by an argument. `--fix` turns a literal True into False.",
    alert="MpAgentRunFailed",
    find=_find,
    fixable=True,
)
