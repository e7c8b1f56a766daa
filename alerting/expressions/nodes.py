"""Expressions: nodes that say, as plain data, what a condition looks at.

They are values, not text, because more than one reader takes them: `promql` renders them as rules,
and whatever else is derived from a condition can interpret or `walk` them likewise.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Expression:
    """A signal (a number per run) or a predicate (the runs for which something holds)."""


def walk(expression: Expression) -> Iterator[Expression]:
    """Yield `expression` and all expressions below it."""
    yield expression
    for field in fields(expression):
        value = getattr(expression, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Expression):
                yield from walk(part)
