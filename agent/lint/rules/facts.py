"""Questions that several rules ask of a trace, and of the datasets in it."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.interpret.values import Operation, Trace, Value, ValueKind

_BACKWARD = ("<tensor>.backward", "torch.autograd.backward")


def backwards(trace: Trace) -> Iterator[Operation]:
    """Yield the calls of backward."""
    return trace.of(*_BACKWARD)


def loss_of(backward: Operation) -> Value:
    """Return the tensor that backward is called on."""
    if backward.target == "torch.autograd.backward":
        return backward.argument(0, "tensors") or backward.receiver
    return backward.receiver


def last_backward(trace: Trace, before: Operation) -> Operation | None:
    """Return the latest backward before an operation that the same run may have made."""
    found = None
    for operation in backwards(trace):
        if operation.index < before.index and operation.compatible(before):
            found = operation
    return found


def parameters_of(value: Value | None) -> Iterator[Value]:
    """Yield the parameters that an optimizer is given: directly, in lists, in groups."""
    if value is None:
        return
    if value.kind is ValueKind.PARAMETERS:
        yield value
    for item in value.items:
        yield from parameters_of(item)


def text_of(operation: Operation) -> str:
    """Return the source of an operation, on one line and not too long."""
    source = operation.place.module.source
    text = " ".join(source.excerpt(source.span(operation.place.node)).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


_MAP_STYLE = re.compile(
    r"^torchvision\.datasets\.(\w+\.)?[A-Z]\w*$"
    r"|^torch\.utils\.data\.(dataset\.)?(TensorDataset|Subset|ConcatDataset)$"
)
_RANDOM = re.compile(r"random|randint|randperm|choice|shuffle|sample", re.IGNORECASE)
_DISTRIBUTES = re.compile(r"rank|world_size|shard|replica|distributed", re.IGNORECASE)


def keyword(made: Value, position: int, name: str) -> ast.expr | None:
    """Return the expression of an argument of the call that made a value; None without one.

    An argument that may hide in `*arguments` or `**options` is the whole call.
    """
    if made.place is None or not isinstance(made.place.node, ast.Call):
        return None
    node = made.place.node
    for one in node.keywords:
        if one.arg == name:
            is_none = isinstance(one.value, ast.Constant) and one.value.value is None
            return None if is_none else one.value
    if any(one.arg is None for one in node.keywords):
        return node
    if any(isinstance(one, ast.Starred) for one in node.args):
        return node
    return node.args[position] if position < len(node.args) else None


def is_fixed(dataset: Value) -> bool:
    """Return whether a dataset certainly has an order of samples, the same at each pass."""
    return _is_known(dataset) and not _matches(dataset, _RANDOM)


def is_whole(dataset: Value) -> bool:
    """Return whether a dataset certainly is the same on every rank."""
    return _is_known(dataset) and not _matches(dataset, _DISTRIBUTES)


def _is_known(dataset: Value) -> bool:
    if dataset.maybe:
        return False
    if dataset.klass is not None and dataset.kind is ValueKind.INSTANCE:
        return "__getitem__" in dataset.klass.methods and "__iter__" not in dataset.klass.methods
    return _MAP_STYLE.match(dataset.name) is not None


def _matches(dataset: Value, pattern: re.Pattern[str]) -> bool:
    if dataset.klass is None:
        return False
    source, node = dataset.klass.module.source, dataset.klass.node
    return source.matches(pattern, node.lineno, node.end_lineno or node.lineno)
