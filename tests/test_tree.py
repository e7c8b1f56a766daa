"""Tests stand where the module that they test stands."""

from pathlib import Path

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
