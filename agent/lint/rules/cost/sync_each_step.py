"""MP117: the host waits for the device at every step."""

from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.interpret.values import ValueKind
from mp_agent.lint.rule import Problem, Rule
from mp_agent.lint.rules.facts import backwards, text_of

_SYNCS = ("<tensor>.item", "<tensor>.cpu", "<tensor>.tolist", "<host>float", "<host>int")
_TRAINING = frozenset({"optim", "step", "engine", "accelerat"})
"""Parts of names; a module that trains has one of them."""
_ON_DEVICE = frozenset({"loss", "losses", "acc", "grad_norm", "norm"})


def _find(trace: Trace) -> Iterator[Problem]:
    if not trace.mentions(_TRAINING):
        return  # gradients for their own sake, such as those of a saliency map
    passes = [operation for operation in backwards(trace) if operation.loops]
    trained = {operation.receiver.key for operation in passes}
    for operation in trace.of(*_SYNCS):
        if not operation.loops or not _is_on_device(operation, trained):
            continue
        if any(_at_every_step(operation, backward) for backward in passes):
            yield Problem(
                operation.place,
                f"`{text_of(operation)}` waits for the device at every step of the loop",
            )


def _is_on_device(operation: Operation, trained: set[str]) -> bool:
    value = operation.receiver
    if value.kind is ValueKind.TENSOR or value.key in trained:
        return value.kind is not ValueKind.ARRAY
    last = value.key.rpartition(":")[2].rpartition(".")[2]
    return operation.target == "<tensor>.item" and last in _ON_DEVICE


def _at_every_step(operation: Operation, backward: Operation) -> bool:
    if operation.target == "<tensor>.cpu" and operation.index < backward.index:
        return False  # a part of the model
    return backward.loops == operation.loops and set(operation.path) <= set(backward.path)


SYNC_EACH_STEP = Rule(
    code="MP117",
    name="sync-each-step",
    severity=FindingSeverity.NOTE,
    summary="`.item()`, `.cpu()` or `float(tensor)` runs at every training step.",
    explanation="Each call waits until the device has finished what was queued, so the host "
    "cannot prepare the next step meanwhile. Calls under a condition (every hundredth step), "
    "after the loop, or in evaluation are not reported.",
    bad="""\
def train(model, loader, optimizer):
    total = 0.0
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total
""",
    good="""\
def train(model, loader, optimizer):
    total = 0.0
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total
""",
    remedy="Add up `loss.detach()` on the device, and read it every so many steps.",
    alert="MpAgentRankStraggler",
    find=_find,
)
