"""What rules ask of a trace: what becomes of gradients, what code hides, which data there are."""

import ast
import builtins
import re
from collections.abc import Iterator

from mp_agent.lint.interpret.values import Operation, Trace, Value, ValueKind


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


CLIP = re.compile(r"^(torch\.nn\.utils\.(clip_grad\.)?|<model>\.)clip_grad_(norm_?|value_)$")
_BACKWARD = ("<tensor>.backward", "torch.autograd.backward")
_CODE_AFTER_HASH = re.compile(r"#[^\r\n]*")
_CLEARS = re.compile(r"zero_?grad|\.grad(\.data)?\s*=|grad(\.data)?\.\w+_\(|del .*\.grad|zero_\(")
_SOUNDS_CLEARING = re.compile(r"zero|clear|clean|optimi[sz]e|(^|_)grad|(^|_)opt(_|$)|train")
_SOUNDS_USING = re.compile(
    r"zero|optimi[sz]e|(^|(?<!no)_)(grad|opt)(_|$)|^_*(train|fit)|step|backward"
)
_PRECISION = re.compile(r"amp\b|fp16|bf16|half|scaler|mixed|precision", re.IGNORECASE)
_PLAIN_PACKAGES = frozenset(
    """torch torchvision numpy math time logging tqdm os sys json random datetime pprint itertools
    functools collections contextlib copy warnings wandb matplotlib""".split()
)
_PLAIN_METHODS = frozenset(
    """item append extend update format add_scalar add_scalars set_description set_postfix log info
    debug write flush mean sum view reshape detach to cuda cpu size backward float long numpy keys
    items values get join split lower upper time strftime squeeze unsqueeze""".split()
)
_PLAIN_OF_MODEL = frozenset(
    """train eval to cuda cpu parameters named_parameters state_dict zero_grad modules children
    named_modules requires_grad_ half float bfloat16 no_sync""".split()
)


def method_of(operation: Operation) -> str:
    """Return the method of a role; empty for what another package defines."""
    target = operation.target
    return target.rpartition(".")[2] if target.startswith("<") else ""


def is_backward(operation: Operation) -> bool:
    """Return whether an operation computes gradients."""
    return operation.target in _BACKWARD


def is_clearing(operation: Operation) -> bool:
    """Return whether an operation clears gradients, of whatever."""
    return method_of(operation) == "zero_grad"


def stepped(operation: Operation) -> Value | None:
    """Return the optimizer whose step an operation is; None for a step with a closure."""
    if operation.target == "<optimizer>.step":
        return None if operation.arguments or operation.keywords else operation.receiver
    if operation.target == "<scaler>.step" and len(operation.arguments) == 1:
        return operation.arguments[0]
    return None


def steps(trace: Trace) -> Iterator[tuple[Operation, Value]]:
    """Yield the steps of optimizers without a closure, with the optimizer."""
    for operation in trace.of("<optimizer>.step", "<scaler>.step"):
        optimizer = stepped(operation)
        if optimizer is not None and optimizer.key:
            yield operation, optimizer


def clears(operation: Operation, optimizer: Value) -> bool:
    """Return whether an operation certainly clears what an optimizer steps with."""
    if not is_clearing(operation):
        return False
    if operation.receiver.key == optimizer.key:
        return True
    return models_of(optimizer) == {operation.receiver.key}


def models_of(optimizer: Value) -> set[str]:
    """Return the keys of the models whose parameters an optimizer is given, as far as known."""
    return {group.name for item in optimizer.items for group in parameters_of(item)}


def common_loops(one: Operation, other: Operation) -> tuple[int, ...]:
    """Return the loops that two operations share, outermost first."""
    shared = []
    for mine, theirs in zip(one.loops, other.loops, strict=False):
        if mine != theirs:
            break
        shared.append(mine)
    return tuple(shared)


def within(trace: Trace, loop: int) -> Iterator[Operation]:
    """Yield the operations in the body of a loop, and what it calls."""
    return (operation for operation in trace.operations if loop in operation.loops)


def loop_of(trace: Trace, loop: int) -> Operation | None:
    """Return the operation that begins a loop; None for a comprehension."""
    for operation in trace.of("<loop>"):
        if operation.loops[-1] == loop:
            return operation
    return None


def repeats(trace: Trace, operation: Operation, loop: Operation) -> bool:
    """Return whether a loop may come to an operation again: it has passes, and does not end."""
    if has_one_pass(loop):
        return False
    own = loop.loops
    return not any(
        leave.index > operation.index
        and leave.loops[: len(own)] == own
        and leave.arguments[0].constant < len(own)
        and set(leave.path) <= set(operation.path)
        for leave in trace.of("<leave>")
    )


def has_one_pass(loop: Operation) -> bool:
    """Return whether a loop certainly has one pass at most."""
    over = loop.receiver
    if over.name == "range" and len(over.items) == 1:
        return over.items[0].kind is ValueKind.CONSTANT and over.items[0].constant in (0, 1)
    return over.kind is ValueKind.SEQUENCE and over.name != "dict" and _is_single(loop)


def _is_single(loop: Operation) -> bool:
    node = loop.place.node
    return (
        isinstance(node, ast.For)
        and isinstance(node.iter, ast.List | ast.Tuple)
        and len(node.iter.elts) == 1
    )


def is_made_in(trace: Trace, value: Value, loop: Operation) -> bool:
    """Return whether an object is another one at each pass of a loop."""
    if any(mark in value.key for mark in ("each:", "[", "index:")):
        return True
    own = loop.loops[-1]
    if any(_makes(one, value) for one in within(trace, own)):
        return True
    node, path = loop.place.node, loop.place.module.path
    return any(
        key_path == path and node.lineno <= int(line) <= (node.end_lineno or node.lineno)
        for key_path, line in _PLACES.findall(value.key)
    )


def _makes(operation: Operation, value: Value) -> bool:
    """Return whether a call makes an object; one that it was given it only passes on."""
    return (
        operation.result.key == value.key
        and (operation.target[0] != "<" or operation.target == "<new>")
        and all(given.key != value.key for given in operation.arguments)
    )


_PLACES = re.compile(r"([^:]+):(\d+):\d+:\d+")


def code_of(operation: Operation) -> str:
    """Return the source of an operation, or of a loop, without comments."""
    node, source = operation.place.node, operation.place.module.source
    lines = source.lines[node.lineno - 1 : node.end_lineno]
    return _CODE_AFTER_HASH.sub("", "".join(lines))


def may_clear(operation: Operation) -> bool:
    """Return whether gradients are cleared, or code that is not seen may do so."""
    method = method_of(operation)
    if method == "zero_grad" or operation.target == "<grad>.set":
        return True
    if operation.target == "<optimizer>.step":
        return bool(operation.arguments or operation.keywords)
    if operation.receiver.key.rpartition(".")[2] == "grad" and method.endswith("_"):
        return True
    if operation.receiver.kind is ValueKind.OPTIMIZER:
        return method not in ("state_dict", "load_state_dict", "step")
    given = (*operation.arguments, *operation.keywords.values())
    if operation.target == "<unseen>":
        return _sounds_clearing(operation) or any(_trains(value) for value in given)
    if not method:
        package = operation.target.partition(".")[0]
        return (
            package not in _PLAIN_PACKAGES
            and operation.target != "apex.amp.scale_loss"
            and any(value.kind is ValueKind.OPTIMIZER for value in given)
        )
    return method not in ("train", "zero_") and _SOUNDS_CLEARING.search(method) is not None


def _sounds_clearing(operation: Operation) -> bool:
    return _SOUNDS_CLEARING.search(_called(operation)) is not None


def _called(operation: Operation) -> str:
    """Return the last name of what is called."""
    node = operation.place.node
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return called.rpartition(".")[2]


def _trains(value: Value) -> bool:
    return value.kind in (ValueKind.OPTIMIZER, ValueKind.SCALER, ValueKind.INSTANCE)


def mentions_clearing(trace: Trace, loop: Operation, step: Operation) -> bool:
    """Return whether the source of a loop has words that clear gradients.

    Those do not count that only clear where another precision than that of the step is used.
    """
    elsewhere = {
        one.place.node.lineno
        for one in within(trace, loop.loops[-1])
        if is_clearing(one)
        and one.place.module is loop.place.module
        and _has_other_precision(one, step)
    }
    first = loop.place.node.lineno
    return any(
        _CLEARS.search(line) is not None and number not in elsewhere
        for number, line in enumerate(code_of(loop).split("\n"), first)
    )


def _has_other_precision(one: Operation, other: Operation) -> bool:
    mine = dict(one.path)
    return any(
        mine.get(condition, arm) != arm and _PRECISION.search(condition)
        for condition, arm in other.path
    )


def may_touch(operation: Operation) -> bool:
    """Return whether code that is not seen may compute, use, or clear gradients."""
    target, method = operation.target, method_of(operation)
    if target in ("<unseen>", "<grad>.set") or target.startswith("<instance>."):
        return True
    if ".grad" in operation.receiver.key:
        return True
    if target.startswith("<tensor>.") and operation.receiver.kind is ValueKind.UNKNOWN:
        return method not in _PLAIN_METHODS
    if target.startswith("<model>."):
        return method not in _PLAIN_OF_MODEL
    if target.startswith("<"):
        return False
    if target == "torch.autograd.grad":
        return True
    package = target.partition(".")[0]
    return package not in _PLAIN_PACKAGES and not hasattr(builtins, package)


def may_use(operation: Operation) -> bool:
    """Return whether code that is not seen sounds like using gradients, or is given their user."""
    if not may_touch(operation):
        return False
    if (
        operation.target in ("<grad>.set", "torch.autograd.grad")
        or ".grad" in operation.receiver.key
    ):
        return True
    given = (*operation.arguments, *operation.keywords.values())
    return _SOUNDS_USING.search(_called(operation)) is not None or any(
        value.kind in (ValueKind.OPTIMIZER, ValueKind.SCALER) for value in given
    )


def reads_gradients(trace: Trace) -> bool:
    """Return whether a module of the trace uses `.grad` by itself."""
    return any("grad" in module.identifiers for module in trace.modules)


def makes_gradients(trace: Trace) -> bool:
    """Return whether a trace has a backward pass."""
    return next(backwards(trace), None) is not None


def is_unlimited(clip: Operation) -> bool:
    """Return whether the limit is infinite: then the call only measures."""
    node = clip.place.node
    return isinstance(node, ast.Call) and any(
        "inf" in ast.unparse(one)
        for one in (*node.args[1:2], *(keyword.value for keyword in node.keywords))
    )
