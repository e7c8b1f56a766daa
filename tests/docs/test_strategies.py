"""Every value of `strategy` is explained in docs/replicas.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.numerics.variants import VARIANTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "replicas.md"

_RETURNS = {"_strategy", "_held", "_sources"}
"""Functions that return values, or parts of them."""


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the strings in an expression; of a formatted one its beginning, with `0` behind."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values
        )
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from strings(child)


def values() -> set[str]:
    """Return the names that the code gives placements, without what joins them."""
    found: set[str] = set()
    for path in [*(ROOT / "agent" / "probe").rglob("*.py"), ROOT / "agent/node/run/views.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in _RETURNS:
                for each in ast.walk(node):
                    if isinstance(each, ast.Return) and each.value is not None:
                        found.update(strings(each.value))
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", "")
                if name == "PlacementAxis":
                    found.update(strings(node.args[2]))
                for keyword in node.keywords:
                    if keyword.arg == "strategy":
                        found.update(strings(keyword.value))
    return {value for value in found if re.fullmatch(r"[a-z_0-9]+", value)}


def test_every_strategy_has_a_row():
    explained = set(re.findall(r"`([a-z_0-9]+)`", PAGE.read_text(encoding="utf-8")))
    seen = {part for variant in VARIANTS.values() for part in variant.strategy.split("+")}
    assert {"ddp", "fsdp1", "tp", "dp", "zero1", "none", "mixed", "replicated"} <= values()
    assert (values() | seen) - explained == set()
