"""Questions that several rules ask of a trace."""

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
