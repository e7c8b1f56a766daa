"""Mutants of a small repository: which the tests kill, and which survive."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.subtests import each
from tools.mutants import ROOT, all_mutations, package_of, sample
from tools.mutations import mutations_of

_MODULE = '''\
def within(value: int) -> bool:
    """Return whether a value is below the limit."""
    return value < 3


def twice(value: int) -> int:
    return value * 2
'''
_TESTS = """\
from agent.ring.limits import twice, within


def test_the_limit_is_not_within():
    assert within(2) and not within(3)


def test_nothing_remains_nothing():
    assert twice(0) == 0
"""
_WIDER_TESTS = """\
from agent.ring.limits import twice


def test_twice_is_a_whole_number():
    assert isinstance(twice(1), int)
"""
_EXAMINE = """\
import json, sys
from pathlib import Path
from tools.mutants import WIDER, Laboratory, all_mutations, tests_of
root = Path(sys.argv[1])
laboratory = Laboratory(root.parent, root)
suites = (WIDER, tests_of("agent/ring"))
laboratory.limits_seconds = {tests: laboratory.limit_seconds(tests) for tests in suites}
drawn = [one for one in all_mutations("agent/ring", root) if one.after in sys.argv[2:]]
print(json.dumps({one.after: laboratory.examine(one).fate.name for one in drawn}))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
        "agent/ring/limits.py": _MODULE,
        "tests/agent/ring/test_limits.py": _TESTS,
        "tests/agent/node/collect/test_nothing.py": "def test_nothing(): pass\n",
        "tests/outputs/test_wider.py": _WIDER_TESTS,
    }
    for name, text in files.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "repository"


@pytest.mark.slow
def test_what_a_test_notices_is_killed_and_what_none_notices_survives(repository: Path) -> None:
    mutants = ("(value <= 3)", "(value / 2)", "(1)")
    done = subprocess.run(
        [sys.executable, "-c", _EXAMINE, str(repository), *mutants],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "(value <= 3)": "KILLED",
        "(value / 2)": "KILLED_LATER",
        "(1)": "SURVIVED",
    }
    assert (repository / "agent/ring/limits.py").read_text() == _MODULE


def test_a_sample_is_the_same_each_time_and_has_as_many_of_each_package() -> None:
    packages = ("agent/ring", "alerting/detector")
    drawn = sample(21, 5, packages)
    assert drawn == sample(21, 5, packages) != sample(21, 6, packages)
    assert [sum(package_of(one) == name for one in drawn) for name in packages] == [11, 10]
    assert len(set(drawn)) == 21


def test_every_mutant_is_another_module_that_python_reads() -> None:
    found = all_mutations("agent/ring/format")
    assert len(found) > 300
    for mutation in found[::7]:
        source = (ROOT / mutation.path).read_bytes()
        assert ast.dump(ast.parse(mutation.applied(source))) != ast.dump(ast.parse(source))


@each(
    ("source", "mutants"),
    [
        ("a = b < c", ["a = (b <= c)"]),
        ("a = b and c", ["a = (b or c)"]),
        ("a += 1", ["a -= 1", "pass", "a += (0)", "a += (2)"]),
        ("if a > b: c()", ["if (a >= b): c()", "if (not (a > b)): c()", "if a > b: pass"]),
        ("if a == b: c = 0.5", ["if (a != b): c = 0.5", "c = (-0.5)", "c = (1.5)"]),
        ("a.b = c", ["pass"]),
        ("a = True", ["a = False"]),
        ("def f():\n  return a", ["def f():\n  return None"]),
        ("def f(a: 'B' = 1 if c < 0 else d): '''1 < 2'''", 6),
        ("log.info('a', 1 + 1)", []),
        ("a: int | None", []),
        ("@dataclass(slots=True)\nclass A: pass", []),
        ("'''Docstring.'''", []),
        ("__all__ = ['a']", []),
        ("a = f'{b + 1}' + c", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  a = 1", []),
    ],
)
def test_what_is_changed_and_what_is_left_out(source: str, mutants: list[str] | int) -> None:
    found = [one.applied(source.encode()).decode() for one in mutations_of(source.encode(), "a.py")]
    if isinstance(mutants, int):
        assert len(found) == mutants
    else:
        assert len(found) == len(mutants)
        for expected in mutants:
            assert any(one.endswith(expected) for one in found), found
