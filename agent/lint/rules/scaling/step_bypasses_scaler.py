"""MP109: optimizer.step after a scaled backward."""

from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.rule import Problem, Rule
from mp_agent.lint.rules.facts import last_backward, loss_of


def _find(trace: Trace) -> Iterator[Problem]:
    for step in trace.of("<optimizer>.step"):
        backward = last_backward(trace, step)
        if backward is None or not loss_of(backward).scaled or _is_alternative(step, trace):
            continue
        yield Problem(
            step.place,
            "optimizer.step() applies gradients that are multiplied by the loss scale, and Inf or "
            "NaN among them: use scaler.step(optimizer)",
        )


def _is_alternative(step: Operation, trace: Trace) -> bool:
    """Return whether another branch of the same test takes the step with the scaler."""
    mine = dict(step.path)
    return any(
        key in mine and mine[key] != arm
        for other in trace.of("<scaler>.step")
        for key, arm in other.path
    )


STEP_BYPASSES_SCALER = Rule(
    code="MP109",
    name="step-bypasses-scaler",
    severity=FindingSeverity.ERROR,
    summary="`optimizer.step` is called in place of `scaler.step`.",
    explanation="After `scaler.scale(loss).backward()`, only `scaler.step(optimizer)` divides the "
    "gradients by the loss scale and skips the step when one of them is Inf or NaN.",
    bad="""\
import torch


def step(model, x, optimizer, scaler):
    scaler.scale(model(x).mean()).backward()
    optimizer.step()
    scaler.update()
""",
    good="""\
import torch


def step(model, x, optimizer, scaler):
    scaler.scale(model(x).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    remedy="Call `scaler.step(optimizer)`, for every optimizer whose loss was scaled.",
    alert="MpAgentNonFiniteUpdate",
    find=_find,
)
