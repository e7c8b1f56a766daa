"""A name of a public class stands for one class."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("agent", "alerting", "exporters")


@pytest.mark.slow
def test_no_two_public_classes_have_the_same_name() -> None:
    modules = defaultdict(list)
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    modules[node.name].append(str(path.relative_to(_ROOT)))
    assert len(modules) > 100
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
