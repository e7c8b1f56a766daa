"""Rules on what a training loop does besides its gradients: modes, accumulation, freezing.

And on calls that are none.
"""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.modules import ModuleInfo
from mp_agent.lint.interpret.values import Operation, Place, Trace, Value, ValueKind
from mp_agent.lint.rules.events import (
    backwards,
    common_loops,
    is_made_in,
    loop_of,
    method_of,
    repeats,
    within,
)
from mp_agent.lint.rules.syntax import imports_torch, nodes_of, scopes

_TRAINS = re.compile(r"train|fit|epoch|mode|run|eval|valid|test")
_MODE_MATTERS = re.compile(r"drop_?out|batch_?norm|instance_?norm|self\.training|drop_?path", re.I)


def _find_left_in_evaluation(trace: Trace) -> Iterator[Problem]:
    for change in trace.of("<model>.eval"):
        model = change.receiver
        trained = _training_call(trace, change)
        if trained is None or not _mode_matters(model):
            continue
        shared = common_loops(change, trained)
        loop = loop_of(trace, shared[-1])
        if loop is None or is_made_in(trace, model, loop) or not repeats(trace, change, loop):
            continue
        if ".train(" in "".join(_lines(loop)):
            continue
        if not any(_may_train(one, model) for one in within(trace, shared[-1])):
            yield Problem(
                change.place,
                "the model stays in evaluation mode: from the second pass of the loop on it is "
                "trained without dropout and with frozen batch statistics",
            )


def _training_call(trace: Trace, change: Operation) -> Operation | None:
    """Return the call of a model for a backward pass, in a loop that calls eval() after it.

    Or before it, every so many steps: what is meant to stay in evaluation does not wait for them.
    """
    for backward in backwards(trace):
        if not common_loops(backward, change):
            continue
        if backward.index > change.index and not _at_times(change, backward):
            continue
        for call in trace.of("<model>()"):
            if (
                call.receiver.key == change.receiver.key
                and (call.index > change.index) == (backward.index > change.index)
                and call.index < backward.index
                and not call.no_grad
                and call.compatible(backward)
                and common_loops(call, backward) == backward.loops
                and len(common_loops(call, change)) == len(common_loops(backward, change))
            ):
                return call
    return None


def _at_times(change: Operation, backward: Operation) -> bool:
    extra = set(change.path) - set(backward.path)
    return any(arm and "%" in condition for condition, arm in extra)


def _mode_matters(model: Value) -> bool:
    """Return whether a model has layers that differ in evaluation, as far as known."""
    if model.klass is not None:
        return _MODE_MATTERS.search(model.klass.module.source.text) is not None
    if model.place is None:
        return True
    if model.name.startswith("torch.nn."):
        node = model.place.node
        text = model.place.module.source.excerpt(model.place.module.source.span(node))
        return _MODE_MATTERS.search(text) is not None or "*" in text
    return True


def _may_train(operation: Operation, model: Value) -> bool:
    method = method_of(operation)
    if method in ("train", "set_train", "train_mode"):
        return True
    if operation.target == "<unseen>":
        given = (operation.receiver, *operation.arguments, *operation.keywords.values())
        return any(value.key == model.key or value.kind is ValueKind.INSTANCE for value in given)
    if method:
        return operation.target.startswith("<instance>.") and _TRAINS.search(method) is not None
    package = operation.target.partition(".")[0]
    return package != "torch" and any(value.key == model.key for value in operation.arguments)


def _lines(loop: Operation) -> list[str]:
    node = loop.place.node
    return loop.place.module.source.lines[node.lineno - 1 : node.end_lineno]


LEFT_IN_EVALUATION = Rule(
    code="MP207",
    name="left-in-evaluation",
    severity=FindingSeverity.ERROR,
    summary="`model.eval()` in the epoch loop is not followed by `train()` before training.",
    explanation="After the first evaluation the model trains on without dropout, and batch "
    "normalization uses and keeps its running statistics instead of the batch's. The loss gets "
    "smaller at that moment, if anything. Models that the check knows to have no such layers are "
    "not reported, nor is `eval()` before the training of each pass, which may freeze them on "
    "purpose; every so many steps it is an evaluation.",
    bad="""\
import torch


def fit(model, loader, validation, optimizer, epochs):
    model.train()
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            print(sum(model(x).mean() for x in validation))
""",
    good="""\
import torch


def fit(model, loader, validation, optimizer, epochs):
    for epoch in range(epochs):
        model.train()
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            print(sum(model(x).mean() for x in validation))
""",
    remedy="Call `model.train()` at the start of every epoch, or after the evaluation.",
    alert="MpAgentLeftInEvaluation",
    find=_find_left_in_evaluation,
)


def _find_accumulation_bypassed(trace: Trace) -> Iterator[Problem]:
    for operation in trace.of("accelerate.Accelerator"):
        given = operation.argument(-1, "gradient_accumulation_steps")
        if given is None or (given.kind is ValueKind.CONSTANT and not _is_above_1(given.constant)):
            continue
        sources = {module.path: module for module in (operation.place.module, *trace.modules)}
        names = {name for module in sources.values() for name in _attributes(module)}
        if {"backward", "step"} <= names and not names & _ACCUMULATING:
            yield Problem(
                operation.place,
                "nothing accumulates: losses are divided by gradient_accumulation_steps, and each "
                "micro-batch makes a step",
            )


def _is_above_1(constant: object) -> bool:
    return isinstance(constant, int) and constant > 1


@lru_cache(maxsize=1000)
def _attributes(module: ModuleInfo) -> frozenset[str]:
    """Return all names that a module reads as attributes, and `%` where one decides on steps."""
    nodes = list(ast.walk(module.tree))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if any(isinstance(node, ast.Mod) for node in nodes) and any(map(_counts, nodes)):
        names.add("%")
    return frozenset(names)


def _counts(node: ast.AST) -> bool:
    """Return whether a remainder has to do with accumulation, or decides on a step."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod) and _COUNTED.search(ast.unparse(node)) is not None
    if not isinstance(node, ast.If) or not any(
        isinstance(one, ast.Mod) for one in ast.walk(node.test)
    ):
        return False
    inner = [one for statement in node.body + node.orelse for one in ast.walk(statement)]
    return any(
        isinstance(one, ast.Continue) or (isinstance(one, ast.Attribute) and one.attr == "step")
        for one in inner
    )


_COUNTED = re.compile(r"accum|micro", re.IGNORECASE)
_ACCUMULATING = frozenset({"accumulate", "no_sync", "_set_sync_gradients", "_do_sync", "%"})
"""What says which backward is the last of a step. Without it `sync_gradients` is always True."""

ACCUMULATION_BYPASSED = Rule(
    code="MP218",
    name="accumulation-bypassed",
    severity=FindingSeverity.ERROR,
    summary="accelerate is to accumulate, and the loop steps at each micro-batch.",
    explanation="`Accelerator.backward` divides each loss by `gradient_accumulation_steps`, but "
    "only within `accumulate` does the optimizer wait for the last micro-batch. Without it each "
    "micro-batch makes a step, with gradients that are too small by that factor. Code that counts "
    "micro-batches by a remainder, or calls `no_sync`, is not reported.",
    bad="""\
from accelerate import Accelerator


def train(model, optimizer, loader):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
""",
    good="""\
from accelerate import Accelerator


def train(model, optimizer, loader):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
""",
    remedy="Run the body of the loop within `with accelerator.accumulate(model):`.",
    alert="MpAgentAccumulationBypassed",
    find=_find_accumulation_bypassed,
)


def _find_freezing_without_effect(trace: Trace) -> Iterator[Problem]:
    for one in trace.of("<requires>.set"):
        target, given = one.place.node, one.arguments[0]
        if not isinstance(target, ast.Attribute):
            continue
        name = target.attr
        if name in ("require_grad", "requires_grads", "require_grads"):
            yield Problem(one.place, f"`{name}` is no attribute of a parameter: nothing is frozen")
        elif (
            name == "requires_grad"
            and one.receiver.kind is ValueKind.MODEL
            and given.kind is ValueKind.CONSTANT
            and given.constant is False
        ):
            yield Problem(one.place, "a module has no `requires_grad`: its parameters are trained")


FREEZING_WITHOUT_EFFECT = Rule(
    code="MP219",
    name="freezing-without-effect",
    severity=FindingSeverity.ERROR,
    summary="An attribute is set that freezes nothing.",
    explanation="Parameters have `requires_grad`; modules do not. Python accepts "
    "`module.requires_grad = False`, and the misspelt `parameter.require_grad = False`, as new "
    "attributes that nothing reads, and the layers are trained with the others.",
    bad="""\
from torch import nn


def frozen():
    encoder = nn.Linear(64, 64)
    encoder.requires_grad = False
    return encoder
""",
    good="""\
from torch import nn


def frozen():
    encoder = nn.Linear(64, 64)
    encoder.requires_grad_(False)
    return encoder
""",
    remedy="Call `module.requires_grad_(False)`, or set `requires_grad` of each parameter.",
    alert="",
    no_alert="Layers that were to be frozen are trained as any others.",
    find=_find_freezing_without_effect,
)


_EFFECTS = {
    "backward": "no gradient is computed",
    "step": "nothing is updated",
    "zero_grad": "no gradient is cleared",
    "train": "the mode stays as it is",
    "eval": "the mode stays as it is",
}
_NAMED = re.compile(rf"^\s*\w.*\.({'|'.join(_EFFECTS)})\s*(#.*)?$")


def _find_not_called(trace: Trace) -> Iterator[Problem]:
    if trace.name != "<module>" or not imports_torch(trace.module):
        return
    if not trace.module.source.find(_NAMED):
        return
    for scope in scopes(trace.module):
        nodes = list(nodes_of(scope.body))
        tried = {one for node in nodes if isinstance(node, ast.Try) for one in ast.walk(node)}
        for node in nodes:
            match node:
                case ast.Expr(value=ast.Attribute(attr=method)) if method in _EFFECTS:
                    if node not in tried:
                        yield Problem(
                            Place(trace.module, node),
                            f"`{ast.unparse(node)}` names the method and does not call it: "
                            f"{_EFFECTS[method]}",
                        )


NOT_CALLED = Rule(
    code="MP225",
    name="not-called",
    severity=FindingSeverity.ERROR,
    summary="A method of the training loop is named, and not called.",
    explanation="Without its parentheses, `optimizer.step` is an expression whose value nothing "
    "uses. Python does nothing, and says nothing. Reported for `backward`, `step`, `zero_grad`, "
    "`train` and `eval` that are statements by themselves, other than within `try`, which may ask "
    "whether there is such a method.",
    bad="""\
import torch


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step
""",
    good="""\
import torch


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
""",
    remedy="Add the parentheses.",
    alert="MpAgentOptimizerNeverSteps",
    find=_find_not_called,
)
