"""Rules on what becomes of a loss: kept with its graph, rebuilt from its number."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.modules import ModuleInfo
from mp_agent.lint.interpret.values import Operation, Place, Trace, Value, ValueKind
from mp_agent.lint.rules.events import backwards, loss_of, steps
from mp_agent.lint.rules.syntax import (
    Loop,
    assigned,
    imports_torch,
    names_in,
    nodes_of,
    scopes,
)


def _find_losses_kept(trace: Trace) -> Iterator[Problem]:
    if trace.name != "<module>" or "backward(" not in trace.module.source.text:
        return
    if not imports_torch(trace.module):
        return
    steps_made = _returning_losses(trace.module)
    for scope in scopes(trace.module):
        own = list(nodes_of(scope.body))
        for loop in own:
            if isinstance(loop, Loop):
                for statement, name in _kept(own, loop, steps_made):
                    yield Problem(
                        Place(trace.module, statement),
                        f"`{name}` keeps the graph of each pass's loss: memory grows with the "
                        "number of passes",
                    )


def _returning_losses(module: ModuleInfo) -> frozenset[str]:
    """Return the functions that make a step and return its loss, graph and all.

    Of functions that share a name, none is meant.
    """
    found = set()
    for name, functions in module.functions_by_name.items():
        if len(functions) != 1 or isinstance(functions[0].node, ast.Lambda):
            continue
        inside = list(nodes_of(functions[0].node.body))
        returns = [index for index, one in enumerate(inside) if isinstance(one, ast.Return)]
        losses = [(loss, index) for index, one in enumerate(inside) for loss in _losses(one)]
        if (
            len(returns) == 1
            and any(map(_is_step, inside))
            and any(
                ast.unparse(inside[returns[0]]) == f"return {loss}"
                and _is_same(inside, loss, *sorted((at, returns[0])))
                for loss, at in losses
            )
        ):
            found.add(name)
    return frozenset(found)


_FEW = re.compile(r"agents|heads|tasks|models|optimi[sz]ers|networks|members|phases|clients|zip\(")
"""Loops over a few parts of one step, or of one epoch: what they keep is dropped soon."""
_PASSES_MIN = 100


def _has_few_passes(over: ast.expr) -> bool:
    match over:
        case ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=int(count))]):
            return count < _PASSES_MIN
    return _FEW.search(ast.unparse(over)) is not None


def _is_step(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
    )


def _kept(
    own: list[ast.AST], loop: Loop, steps_made: frozenset[str]
) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield what adds the loss of a pass to something that outlives the pass, with its name."""
    inside = list(nodes_of(loop.body, loops=False))
    if isinstance(loop, ast.For) and _has_few_passes(loop.iter):
        return
    losses = [(name, index) for index, node in enumerate(inside) for name in _losses(node)]
    steps_taken = [
        (node.targets[0].id, index + 1)
        for index, node in enumerate(inside)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).removeprefix("self.") in steps_made
    ]
    losses += steps_taken
    if not losses or not (steps_taken or any(map(_is_step, inside))):
        return
    detached = {
        one
        for node in inside
        if isinstance(node, ast.With) and "no_grad" in ast.unparse(node.items[0].context_expr)
        for one in ast.walk(node)
    }
    used = {name for node in own if _is_backward(node) for name in names_in(node)}
    for index, node in enumerate(inside):
        added = None if node in detached else _added(node)
        if added is None or added[0] in used or not _lives_on(own, inside, loop, node, added[0]):
            continue
        if any(
            _is_bare(added[1], loss) and _is_same(inside, loss, *sorted((at, index)))
            for loss, at in losses
        ):
            assert isinstance(node, ast.expr | ast.stmt)
            yield node, added[0]


def _lives_on(
    own: list[ast.AST], inside: list[ast.AST], loop: Loop, node: ast.AST, name: str
) -> bool:
    """Return whether a name certainly is a number, a tensor or a list that no pass replaces."""
    before = [
        value
        for one in own
        for bound, value in assigned(one)
        if bound == name and getattr(one, "lineno", loop.lineno) < loop.lineno
    ]
    is_list = isinstance(node, ast.Call)
    replaced = [one for one in inside if any(bound == name for bound, _ in assigned(one))]
    return (
        bool(before)
        and all(_is_list(value) or (not is_list and _is_number(value)) for value in before)
        and all(one is node for one in replaced)
        and not any(isinstance(one, ast.Call) and _empties(one, name) for one in inside)
    )


def _empties(call: ast.Call, name: str) -> bool:
    return ast.unparse(call.func) in {f"{name}.{way}" for way in ("clear", "pop", "popleft")}


def _is_same(inside: list[ast.AST], loss: str, first: int, last: int) -> bool:
    """Return whether a name is bound in the pass before two nodes, and not between them."""
    bound = [index for index, one in enumerate(inside) if loss in (n for n, _ in assigned(one))]
    bound += [
        index
        for index, one in enumerate(inside)
        if isinstance(one, ast.Call) and ast.unparse(one.func) == f"{loss}.detach_"
    ]
    return any(index < first for index in bound) and not any(first < one < last for one in bound)


def _is_backward(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("backward", "manual_backward", "grad")
    )


_GIVEN = re.compile(r"accelerator|fabric|engine|booster|optimizer|manual_backward", re.IGNORECASE)
"""What is given the loss whose backward it calls; a network of one's own is given a gradient."""


def _losses(node: ast.AST) -> Iterator[str]:
    """Yield the name of what backward is called on, or is given, if it frees the graph."""
    if not _is_backward(node) or not isinstance(node, ast.Call):
        return
    assert isinstance(node.func, ast.Attribute)
    if node.func.attr == "grad" or any(one.arg == "retain_graph" for one in node.keywords):
        return
    given = node.func.value
    if node.args and _GIVEN.search(ast.unparse(node.func)):
        given = node.args[0]
    while isinstance(given, ast.Call) and len(given.args) == 1:  # scaler.scale(loss)
        given = given.args[0]
    while isinstance(given, ast.BinOp):
        given = given.left
    if isinstance(given, ast.Name):
        yield given.id


def _added(node: ast.AST) -> tuple[str, ast.expr] | None:
    """Return the name of what a node adds something to, and what it adds."""
    match node:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
            return name, value
        case ast.Assign(
            targets=[ast.Name(id=name)], value=ast.BinOp(left=left, op=ast.Add(), right=right)
        ):
            for mine, other in ((left, right), (right, left)):
                if isinstance(mine, ast.Name) and mine.id == name:
                    return name, other
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]):
            return name, value
    return None


def _is_bare(value: ast.expr, loss: str) -> bool:
    """Return whether a value is the loss itself, or a multiple of it."""
    if isinstance(value, ast.List) and len(value.elts) == 1:
        return _is_bare(value.elts[0], loss)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
        sides = (value.left, value.right) if isinstance(value.op, ast.Mult) else (value.left,)
        return any(_is_bare(side, loss) for side in sides)
    return isinstance(value, ast.Name) and value.id == loss


def _is_list(value: ast.expr | None) -> bool:
    return value is not None and (isinstance(value, ast.List) or ast.unparse(value) == "list()")


def _is_number(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float)
    return isinstance(value, ast.Call) and ast.unparse(value.func) in (
        "torch.zeros",
        "torch.tensor",
    )


LOSSES_KEPT = Rule(
    code="MP221",
    name="losses-kept-with-graphs",
    severity=FindingSeverity.WARNING,
    summary="Losses are added up, or collected, as tensors with their graphs.",
    explanation="A loss leads to the graph that computed it, and a sum of losses to those of all "
    "passes. `backward()` frees the activations, and not the nodes of the graph: with a "
    "transformer of 12 layers, memory of the host grows by 0.4 MiB per pass until the sum is "
    "dropped. Reported where the very loss that backward is called on, in the loop or in a "
    "function that returns it, is added to a number or a list from before the loop that backward "
    "is never called on, and each pass of the loop may make a step: parts of one step, such as "
    "micro-batches, are not reported, nor are fewer than 100 passes.",
    bad="""\
import torch


def train(model, loader, optimizer):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss
    return total / len(loader)
""",
    good="""\
import torch


def train(model, loader, optimizer):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / len(loader)
""",
    remedy="Add `loss.detach()`, which does not wait for the device, or `loss.item()`, which does.",
    alert="",
    no_alert="The numbers of the training are right; memory is not measured.",
    find=_find_losses_kept,
)


_REBUILDS = re.compile(
    r"^torch\.(tensor|as_tensor|FloatTensor|autograd\.(\w+\.)?Variable)$|^<tensor>\.requires_grad_$"
)
_CUTS = re.compile(r"^<tensor>\.detach$|^torch\.(tensor|as_tensor)$")


def _find_rebuilt_loss(trace: Trace) -> Iterator[Problem]:
    for backward in backwards(trace):
        made = _rebuilt(trace, backward)
        if made is None:
            continue
        used = [
            optimizer
            for step, optimizer in steps(trace)
            if step.index > backward.index and step.loops == backward.loops
        ]
        leaf = made.result.key
        if used and not any(leaf == item.key for one in used for item in _all_items(one)):
            yield Problem(
                made.place,
                "the loss is made again from a value, without the graph that computed it: backward "
                "ends here, and no parameter gets a gradient",
            )


def _rebuilt(trace: Trace, backward: Operation) -> Operation | None:
    """Return what makes the tensor that backward is called on, if that is a leaf of its own."""
    loss = loss_of(backward)
    made = None if loss.maybe else _maker(trace, backward, loss)
    if made is not None and made.target == "<scaler>.scale" and made.arguments:
        made = _maker(trace, made, made.arguments[0])
    if made is None or _REBUILDS.match(made.target) is None or backward.loops != made.loops:
        return None
    if not set(made.path) <= set(backward.path):
        return None  # what is no tensor in some runs
    if made.target == "<tensor>.requires_grad_":
        inner = _maker(trace, made, made.receiver)
        cuts = made.receiver.key.endswith(".data") or (
            inner is not None and _CUTS.match(inner.target) is not None
        )
        return made if cuts else None
    given, asked = made.argument(0, "data"), made.keywords.get("requires_grad")
    fixed = given is None or given.kind in (ValueKind.CONSTANT, ValueKind.SEQUENCE)
    return made if asked is not None and asked.constant is True and not fixed else None


def _maker(trace: Trace, before: Operation, value: Value) -> Operation | None:
    """Return the last call before another whose result a value is."""
    for one in reversed(trace.operations[: before.index]):
        if value.key and one.result.key == value.key:
            return one
    return None


def _all_items(value: Value) -> Iterator[Value]:
    for item in value.items:
        yield item
        yield from _all_items(item)


REBUILT_LOSS = Rule(
    code="MP226",
    name="rebuilt-loss",
    severity=FindingSeverity.ERROR,
    summary="`backward` is called on a loss that was made again from its value.",
    explanation="`torch.tensor(value, requires_grad=True)`, `Variable(loss.data, "
    "requires_grad=True)` and `loss.detach().requires_grad_()` have the value of a loss, and no "
    "graph. They silence the error that a tensor does not require gradients, and nothing is "
    "trained: the gradient of the loss is that of the new tensor alone. Reported where an "
    "optimizer that does not hold that tensor is stepped next.",
    bad="""\
import torch


def train(model, loader, optimizer):
    for x, y in loader:
        predicted = model(x).argmax(dim=1)
        loss = torch.tensor((predicted != y).float().mean(), requires_grad=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    good="""\
import torch


def train(model, loader, optimizer):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    remedy="Call `backward` on what the model's outputs were computed into, by functions that have "
    "a gradient.",
    alert="MpAgentNothingTrained",
    find=_find_rebuilt_loss,
)
