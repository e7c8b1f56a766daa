"""Conditions of branches: one name for each question, whichever way it is asked."""

import ast
from functools import lru_cache

Condition = tuple[str, bool]


@lru_cache(maxsize=50_000)
def conditions(test: ast.expr, arm: bool) -> tuple[Condition, ...]:
    """Return what holds on one arm of a test.

    `x is not None`, `x` and `not (x is None)` are the same question; both halves of an `and` hold
    on its true arm, both of an `or` fail on its false arm.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return conditions(test.operand, not arm)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == arm:
        # With the whole as well: the other arm knows only that.
        parts = [part for value in test.values for part in conditions(value, arm)]
        return (*parts, (ast.unparse(test), arm))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right, op = test.left, test.comparators[0], test.ops[0]
        negated = isinstance(op, ast.IsNot | ast.NotEq | ast.NotIn)
        if isinstance(op, ast.Is | ast.IsNot) and _is_none(right):
            return ((ast.unparse(left), arm == negated),)
        if negated:
            positive = {ast.IsNot: ast.Is(), ast.NotEq: ast.Eq(), ast.NotIn: ast.In()}[type(op)]
            return ((ast.unparse(ast.Compare(left, [positive], [right])), not arm),)
    return ((ast.unparse(test), arm),)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
