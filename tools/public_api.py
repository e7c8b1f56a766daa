"""The public names of `mp_agent`, with their signatures as the source has them."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import mp_agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a public dataclass, with the string literal below it."""

    declaration: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicName:
    """One entry of `mp_agent.__all__`. Its signature is Python that compiles."""

    name: str
    signature: str
    docstring: str
    fields: tuple[Field, ...] = ()


def public_names() -> Iterator[PublicName]:
    """Yield every public function and class, in the order of `mp_agent.__all__`.

    Signatures come from the source, so they read the same in every version of Python.
    """
    for name in mp_agent.__all__:
        value = getattr(mp_agent, name)
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
        docstring = inspect.getdoc(value) or ""
        if isinstance(tree, ast.ClassDef):
            yield PublicName(
                name=name,
                signature=f"class {name}: ...",
                docstring=docstring,
                fields=tuple(_fields(tree)),
            )
        elif isinstance(tree, ast.FunctionDef):
            yield PublicName(name=name, signature=_signature(tree), docstring=docstring)


def api_summary() -> str:
    """Return the public names and signatures, one per line, without prose."""
    lines = [f"__all__ = {sorted(mp_agent.__all__)}"]
    for entry in public_names():
        lines.append(entry.signature)
        lines.extend(f"    {field.declaration}" for field in entry.fields)
    return "\n".join(lines) + "\n"


def _signature(tree: ast.FunctionDef) -> str:
    # Every parameter is annotated, so defaults are written with spaces.
    parameters = re.sub(r"(?<=\S)=(?=\S)", " = ", ast.unparse(tree.args))
    head = f"def {tree.name}({parameters})"
    return f"{head} -> {ast.unparse(tree.returns)}: ..." if tree.returns else f"{head}: ..."


def _fields(tree: ast.ClassDef) -> Iterator[Field]:
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            yield Field(declaration=ast.unparse(statement), description=_literal(following))


def _literal(statement: ast.stmt | None) -> str:
    """Return the text of a string literal that is a statement."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return ""
    text = statement.value.value
    return inspect.cleandoc(text) if isinstance(text, str) else ""
