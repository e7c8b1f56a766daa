"""What is known of expressions without running them, and in which order they run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mp_agent.lint.interpret.modules import ClassInfo, FunctionInfo, ModuleInfo


FP16, BF16, FP32, FP64, OTHER = "float16", "bfloat16", "float32", "float64", "other"
SIXTEEN_BITS = frozenset({FP16, BF16})


class ValueKind(Enum):
    """What a value is, as far as rules care."""

    UNKNOWN = auto()
    EXTERNAL = auto()
    """Something of another package; `name` is its dotted name."""
    MODULE = auto()
    FUNCTION = auto()
    CLASS = auto()
    INSTANCE = auto()
    BOUND = auto()
    """A function of a class with `self`, its only item."""
    PARTIAL = auto()
    """`name` is unused; the items are the function and its arguments."""
    MODEL = auto()
    LOSS = auto()
    OPTIMIZER = auto()
    SCHEDULER = auto()
    LOADER = auto()
    """A DataLoader of PyTorch."""
    SCALER = auto()
    AUTOCAST = auto()
    NO_GRAD = auto()
    CONTEXT = auto()
    """A context manager of no interest."""
    PARAMETERS = auto()
    """Parameters of the model whose key is `name`."""
    TENSOR = auto()
    ARRAY = auto()
    """An array of NumPy, or a number on the host."""
    DTYPE = auto()
    CONSTANT = auto()
    SEQUENCE = auto()


@dataclass(frozen=True, slots=True)
class Value:
    """One abstract value. `key` names the object: equal keys mean the same object."""

    kind: ValueKind = ValueKind.UNKNOWN
    key: str = ""
    name: str = ""
    dtypes: frozenset[str] = frozenset()
    """Which types of elements are possible; empty when that is unknown."""
    constant: Any = None
    items: tuple[Value, ...] = ()
    function: FunctionInfo | None = None
    klass: ClassInfo | None = None
    module: ModuleInfo | None = None
    place: Place | None = None
    """Where a scaler, an autocast context or a model was made."""
    cast: Place | None = None
    """Where a tensor was explicitly cast to 16 bits."""
    scaled: bool = False
    """A loss that is multiplied by the loss scale."""
    from_autocast: bool = False
    """An output of a model that ran under autocast."""
    maybe: bool = False
    """Disabled, or absent, in some runs."""
    form: tuple[str, str] | None = None
    """How a tensor was computed from another: ("mean", key of the other), …"""
    activation: str = ""
    """The function of which a tensor, or the output of a model, certainly is the result: softmax,
    log_softmax or sigmoid."""
    wrapper: str = ""
    """The dotted name of the wrapper through which a model is called; with `.module`, past it."""

    @property
    def is_sixteen_bits(self) -> bool:
        """Whether the elements certainly have 16 bits."""
        return bool(self.dtypes) and self.dtypes <= SIXTEEN_BITS

    @property
    def is_past_wrapper(self) -> bool:
        """Whether a model was taken out of its wrapper."""
        return self.wrapper.endswith(".module")

    def with_(self, **changes: Any) -> Value:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


UNKNOWN = Value()
NONE = Value(ValueKind.CONSTANT, constant=None)

_MODEL_NAME = re.compile(r"^_?(\w+_)?(model|net|network)$")
_GUESSES = (
    (ValueKind.SCALER, re.compile(r"^_?(\w+_)?(grad|amp|loss)?_?scaler(_\w+)?$", re.IGNORECASE)),
    (ValueKind.OPTIMIZER, re.compile(r"^_?(\w+_)?(optimizer|optim|opt)(_?\w)?$", re.IGNORECASE)),
    (ValueKind.LOSS, re.compile(r"^_?(\w+_)?(criterion|loss_fn|loss_func|loss_function)$")),
    (ValueKind.MODEL, _MODEL_NAME),
)


def guessed(value: Value, name: str) -> Value:
    """Return what a variable of this name usually holds, if nothing else is known of it."""
    if value.kind is ValueKind.TENSOR and value.cast is not None and _MODEL_NAME.match(name):
        return value.with_(kind=ValueKind.MODEL, cast=None, maybe=True)
    if value.kind is not ValueKind.UNKNOWN:
        return value
    for kind, pattern in _GUESSES:
        if pattern.match(name):
            return value.with_(kind=kind, maybe=True)
    return value


def joined(one: Value, other: Value) -> Value:
    """Return what is known after either of two branches."""
    if one == other:
        return one
    first, second = (one, other) if _weight(one) >= _weight(other) else (other, one)
    both = bool(one.dtypes) and bool(other.dtypes)
    return first.with_(
        dtypes=one.dtypes | other.dtypes if both else frozenset(),
        cast=one.cast if one.cast == other.cast else None,
        maybe=True,
        constant=_joined_constant(first, second),
        scaled=one.scaled or other.scaled,
        from_autocast=one.from_autocast and other.from_autocast,
        form=one.form if one.form == other.form else None,
        activation=one.activation if one.activation == other.activation else "",
        wrapper=one.wrapper if one.wrapper == other.wrapper else "one or the other",
        kind=ValueKind.UNKNOWN
        if first.kind is ValueKind.CONSTANT and one.constant != other.constant
        else first.kind,
    )


def _joined_constant(first: Value, second: Value) -> Any:
    if first.kind is not second.kind or first.constant == second.constant:
        return first.constant
    return True if first.kind in (ValueKind.AUTOCAST, ValueKind.SCALER) else None


def _weight(value: Value) -> int:
    if value.kind is ValueKind.UNKNOWN:
        return 1
    return 0 if value.kind in (ValueKind.CONSTANT, ValueKind.CONTEXT) else 2


Path = tuple[tuple[str, bool], ...]
"""The conditions under which something happens, with the branch taken."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node of the syntax tree and the module that it is in."""

    module: ModuleInfo
    node: ast.expr | ast.stmt


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One call, under the circumstances in which it happens.

    `target` is the dotted name of what another package defines ("torch.sum"), or a role and a
    method ("<scaler>.step", "<tensor>.item", "<model>()", "<loss>()", "<autocast>.enter"), or what
    is no call: "<loop>" (the receiver is what it goes over), "<leave>" (break, return or raise; the
    argument is the number of loops that go on),
    "<model>.set", "<grad>.set" and "<requires>.set" (an attribute gets the argument), "<new>" (an
    object of the project), "<unseen>" (code that was not followed), "<no_sync>.enter" and
    "<no_sync>.exit".
    """

    index: int
    target: str
    place: Place
    receiver: Value
    arguments: tuple[Value, ...]
    keywords: Mapping[str, Value]
    path: Path
    loops: tuple[int, ...]
    autocast: Value | None
    no_grad: bool
    result: Value

    def argument(self, position: int, *names: str) -> Value | None:
        """Return an argument by position or keyword; None when it is absent."""
        for name in names:
            if name in self.keywords:
                return self.keywords[name]
        return self.arguments[position] if 0 <= position < len(self.arguments) else None

    def compatible(self, other: Operation) -> bool:
        """Return whether one run can do both: no branch excludes the other."""
        mine = dict(self.path)
        return all(mine.get(key, arm) == arm for key, arm in other.path)


@dataclass(slots=True)
class Trace:
    """The operations of one function, or of a module's top level, from its start to its end."""

    module: ModuleInfo
    name: str
    operations: list[Operation] = field(default_factory=list)
    modules: list[ModuleInfo] = field(default_factory=list)
    """Every module whose code is part of the trace."""

    def of(self, *targets: str) -> Iterator[Operation]:
        """Yield the operations with one of these targets, in order."""
        wanted = frozenset(targets)
        return (operation for operation in self.operations if operation.target in wanted)

    def mentions(self, words: frozenset[str]) -> bool:
        """Return whether a module of the trace uses a name that contains one of these words."""
        return any(module.mentions(words) for module in self.modules)
