"""What all parts of the interpreter share: the state of a trace and of a function's frame."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mp_agent.lint.interpret.modules import ClassInfo, FunctionInfo, ModuleInfo, Project
from mp_agent.lint.interpret.values import UNKNOWN, Operation, Place, Trace, Value

MAX_DEPTH = 5
"""Calls are followed this deep."""
MAX_STATEMENTS = 2000
"""After so many statements, a trace follows no further call."""


@dataclass(slots=True)
class FunctionScope:
    """The names of one function that is being executed."""

    module: ModuleInfo
    names: dict[str, Value]
    function: FunctionInfo | None = None
    outer: FunctionScope | None = None
    global_names: set[str] = field(default_factory=set)
    returned: list[Value] = field(default_factory=list)
    yielded: Value | None = None
    """The autocast or no_grad context under which a generator yields."""
    yields: bool = False
    loops_before: int = 0
    """How many loops are around its call."""


@dataclass(slots=True)
class State:
    """The state of an execution."""

    path: list[tuple[str, bool]] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    autocast: Value | None = None
    no_grad: bool = False
    heap: dict[str, Value] = field(default_factory=dict)
    stack: list[FunctionInfo] = field(default_factory=list)
    statements: int = 0
    entered: int = 0
    """Loops so far: one that is run again, by a second call of its function, is another."""


class Evaluator:
    """State and records; the parts of the interpreter build on it."""

    def __init__(self, project: Project, trace: Trace, followed: set[str]) -> None:
        self.project = project
        self.trace = trace
        self.followed = followed
        """Identities of the functions that were followed into, of all traces."""
        self.state = State()
        self.follows = True

    def enter_loop(self) -> None:
        """Begin a loop; `state.loops.pop()` ends it."""
        self.state.entered += 1
        self.state.loops.append(self.state.entered)

    def evaluate(self, node: ast.expr | None, frame: FunctionScope) -> Value:
        """Return the value of an expression."""
        raise NotImplementedError

    def call(
        self,
        function: Value,
        arguments: Sequence[Value],
        keywords: Mapping[str, Value],
        place: Place,
        frame: FunctionScope,
    ) -> Value:
        """Return the value of a call."""
        raise NotImplementedError

    def environment(self, module: ModuleInfo) -> dict[str, Value]:
        """Return the global names of a module."""
        raise NotImplementedError

    def class_attributes(self, klass: ClassInfo) -> Mapping[str, Value]:
        """Return the attributes that the constructor of a class sets."""
        raise NotImplementedError

    def output_activations(self, klass: ClassInfo) -> tuple[str, ...]:
        """Return the functions in which the outputs of a class's forward pass certainly end."""
        raise NotImplementedError

    def record(
        self,
        target: str,
        place: Place,
        receiver: Value = UNKNOWN,
        arguments: Sequence[Value] = (),
        keywords: Mapping[str, Value] | None = None,
        result: Value = UNKNOWN,
    ) -> None:
        """Add an operation to the trace."""
        state = self.state
        if place.module not in self.trace.modules:
            self.trace.modules.append(place.module)
        self.trace.operations.append(
            Operation(
                index=len(self.trace.operations),
                target=target,
                place=place,
                receiver=receiver,
                arguments=tuple(arguments),
                keywords=dict(keywords or {}),
                path=tuple(state.path),
                loops=tuple(state.loops),
                autocast=state.autocast,
                no_grad=state.no_grad,
                result=result,
            )
        )


def key_of(place: Place) -> str:
    """Return a key for what is made at a place."""
    node = place.node
    return f"{place.module.path}:{node.lineno}:{node.col_offset}:{node.end_col_offset}"
