"""What rules ask of the syntax tree alone: scopes, their own nodes, names."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from mp_agent.lint.interpret.modules import ClassInfo, ModuleInfo

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def scopes(module: ModuleInfo) -> Iterator[Scope]:
    """Yield the top level of a module and its functions."""
    yield module.tree
    for function in module.functions:
        if not isinstance(function.node, ast.Lambda):
            yield function.node


def nodes_of(body: Iterable[ast.AST], *, loops: bool = True) -> Iterator[ast.AST]:
    """Yield the nodes of some statements in their order, without those of inner functions.

    Without those of inner loops either where `loops` is False.
    """
    waiting = [*body][::-1]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, _SCOPES) or (not loops and isinstance(node, Loop)):
            continue
        waiting += [*ast.iter_child_nodes(node)][::-1]


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that a statement binds, each with its value where it is the whole of it."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _bound(target, node.value)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        yield from _bound(node.target, node.value)
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield from _bound(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _bound(node.optional_vars, None)


def _bound(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        exact = len(parts) == len(target.elts)
        for index, one in enumerate(target.elts):
            yield from _bound(one, parts[index] if exact else None)


def names_in(node: ast.AST) -> set[str]:
    """Return the names that are read in a node."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def classes_used(klass: ClassInfo) -> list[ast.ClassDef]:
    """Return a class and the classes of its module that it uses, directly or not."""
    classes = {one.node.name: one.node for one in klass.module.classes}
    found = [klass.node]
    for one in found:
        names = names_in(one) & classes.keys()
        found += [classes[name] for name in names if classes[name] not in found]
    return found


def imports_torch(module: ModuleInfo) -> bool:
    """Return whether a module imports torch itself: `backward` may be another library's."""
    return any(
        name.partition(".")[0] == "torch"
        for node in module.imports
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    )


@lru_cache(maxsize=1000)
def code_without_comments(module: ModuleInfo) -> str:
    """Return the source of a module without comments, or what looks like one in a string."""
    return _COMMENT.sub("", module.source.text)


_COMMENT = re.compile(r"#[^\r\n]*")
