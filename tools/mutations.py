"""Small changes of a Python module, each of one expression or statement."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_LOGGERS = ("log", "logging", "warnings")


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of one place of a file; `begin` and `end` are bytes."""

    path: str
    line: int
    begin: int
    end: int
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """Return the module with the change."""
        return source[: self.begin] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path}:{self.line}: `{before}` → `{after}`"


def mutations_of(source: bytes, path: str) -> list[Mutation]:
    """Return all mutations of a module, in the order of its text."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node, after in _Changes().of(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = source[begin:end].decode()
        found.append(Mutation(path, node.lineno, begin, end, before, after))
    return sorted(found, key=lambda one: (one.begin, one.end, one.after))


Change = tuple[ast.expr | ast.stmt, str]


class _Changes:
    """Walks a module.

    Leaves out annotations, decorators, docstrings, log messages, `__all__` and f-strings.
    """

    def of(self, node: ast.AST) -> Iterator[Change]:
        """Yield the nodes to replace with the texts that replace them."""
        if _is_left_out(node):
            return
        if isinstance(node, ast.expr):
            yield from _expression_changes(node)
        elif isinstance(node, ast.stmt):
            yield from _statement_changes(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.of(child)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr):
        return True  # of parts of an f-string Python 3.11 does not know where they are
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _root_of(node.value).endswith(_LOGGERS)
    if isinstance(node, ast.Assign):
        return any(isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets)
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _root_of(node: ast.expr) -> str:
    """Return the name that a call's function begins with."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _expression_changes(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = _COMPARISONS[type(node.ops[0])]()
        yield node, f"({ast.unparse(ast.Compare(node.left, [other], node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _of_types(node):
        changed = ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
        yield node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"({ast.unparse(ast.BoolOp(other_op, node.values))})"
    elif isinstance(node, ast.IfExp) and not _has_opposite(node.test):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, f"({node.value + 1!r})"
        yield node, f"({node.value - 1!r})"


def _has_opposite(test: ast.expr) -> bool:
    """Return whether another operator negates a test, which is a mutation already."""
    opposites = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
    return (
        isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], opposites)
    )


def _of_types(node: ast.BinOp) -> bool:
    """Return whether an operation is of texts, or makes a union of types."""
    sides = (node.left, node.right)
    names = [ast.unparse(side) for side in sides]
    union = isinstance(node.op, ast.BitOr) and any(name[:1].isupper() for name in names)
    return union or any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )


def _statement_changes(node: ast.stmt) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.While) and not _has_opposite(node.test):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield node, "return None"
    elif isinstance(node, ast.AugAssign):
        if type(node.op) in _ARITHMETIC:
            other = _ARITHMETIC[type(node.op)]()
            yield node, ast.unparse(ast.AugAssign(node.target, other, node.value))
        yield node, "pass"
    elif isinstance(node, ast.Expr | ast.Raise | ast.Continue | ast.Break) or _sets_part(node):
        yield node, "pass"


def _sets_part(node: ast.stmt) -> bool:
    """Return whether a statement only changes a part of what is known under another name."""
    return isinstance(node, ast.Assign) and all(
        isinstance(to, ast.Attribute | ast.Subscript) for to in node.targets
    )
