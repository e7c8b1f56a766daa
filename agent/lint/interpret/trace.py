"""What one function does when it runs, calls of the same project included, in order."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mp_agent.lint.interpret.modules import ModuleInfo
    from mp_agent.lint.interpret.values import Value

Path = tuple[tuple[str, bool], ...]
"""The conditions under which something happens, with the branch taken."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node of the syntax tree and the module that it stands in."""

    module: ModuleInfo
    node: ast.expr | ast.stmt


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One call, under the circumstances in which it happens.

    `target` is the dotted name of what another package defines ("torch.sum"), or a role and a
    method ("<scaler>.step", "<tensor>.item", "<model>()", "<loss>()", "<autocast>.enter").
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
        return any(
            word in name for module in self.modules for name in module.identifiers for word in words
        )
