"""MP108: scaler.step without scaler.update."""

import ast
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.rule import Problem, Rule


def _find(trace: Trace) -> Iterator[Problem]:
    scales = {operation.receiver.key for operation in trace.of("<scaler>.scale")}
    updates = list(trace.of("<scaler>.update"))
    for step in trace.of("<scaler>.step"):
        if step.receiver.key not in scales or any(step.compatible(update) for update in updates):
            continue
        if not _updated_elsewhere(step):
            yield Problem(
                step.place,
                "scaler.step() is never followed by scaler.update(): the second step raises, and "
                "the loss scale never adapts",
            )


def _updated_elsewhere(step: Operation) -> bool:
    """Return whether another function of the module updates the scaler, by its name."""
    node = step.place.node
    scaler = (
        ast.unparse(node.func.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        else ""
    )
    last = scaler.rpartition(".")[2]
    return f"{last}.update(" in step.place.module.source.text


STEP_WITHOUT_UPDATE = Rule(
    code="MP108",
    name="step-without-update",
    severity=FindingSeverity.ERROR,
    summary="`scaler.step` is called without `scaler.update`.",
    explanation="`update()` ends a step for the scaler: it adapts the loss scale and forgets "
    "which optimizers were unscaled and stepped. Without it the next `step()` raises RuntimeError.",
    bad="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
""",
    good="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    remedy="Call `scaler.update()` once per step, after the last `scaler.step()`.",
    alert="MpAgentRunFailed",
    find=_find,
    needs_callers=True,
)
