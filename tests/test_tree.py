"""Tests stand where the module that they test stands."""

from collections import defaultdict
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]


def test_tests_of_the_node_agent_mirror_its_modules() -> None:
    tests = _ROOT / "tests" / "agent" / "node"
    files = [path.relative_to(tests) for path in sorted(tests.rglob("test_*.py"))]
    assert len(files) > 50
    strays = [
        str(path)
        for path in files
        if path.parts[0] != "scenarios"
        and not (_ROOT / "agent" / "node" / path.parent / path.name.removeprefix("test_")).is_file()
    ]
    assert strays == []


@pytest.mark.parametrize("top", ["agent", "alerting", "exporters", "grafana", "tools"])
def test_a_test_with_the_name_of_a_module_stands_in_the_folder_of_that_module(top: str) -> None:
    folders = defaultdict(set)
    for path in (_ROOT / top).rglob("*.py"):
        folders[f"test_{path.name}"].add(path.parent.relative_to(_ROOT / top))
    tests = _ROOT / "tests" / top
    files = [path.relative_to(tests) for path in sorted(tests.rglob("test_*.py"))]
    assert any(path.parent in folders[path.name] for path in files)
    strays = {
        str(path): sorted(map(str, folders[path.name]))
        for path in files
        if folders[path.name] and path.parent not in folders[path.name] | _scenarios(path)
    }
    assert strays == {}


def _scenarios(path: Path) -> set[Path]:
    """Return the test's own folder where it holds tests of a whole, by what happens."""
    return {path.parent} if path.parent.name == "scenarios" else set()
