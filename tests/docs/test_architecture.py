"""Every path and every name that docs/architecture.md mentions exists."""

import ast
import re

import pytest

from tests.docs.pages import ROOT, prose
from tests.every import for_every

PAGE = ROOT / "docs" / "architecture.md"
_REFERENCE = re.compile(
    r"`((?:agent|alerting|exporters|grafana|helm|tests|tools)/[^`:\s]*)(?::([\w.]+))?`"
)
_QUESTIONS = (
    "a straggler is judged",
    "a push to the root is retried",
    "a layer is rolled up",
    "a NaN is counted",
    "a setting is read",
    "an alert is defined",
    "a metric is defined",
    "a dashboard panel is defined",
    "remedy text is written",
)


def references() -> list[tuple[str, str]]:
    """Return the (path, name) pairs of the page; an empty name where only a path is given."""
    return sorted({(path, name) for path, name in _REFERENCE.findall(prose(PAGE))})


def defined_names(text: str) -> set[str]:
    """Return the names that a module defines at its top level, and `Class.member` for classes."""
    names: set[str] = set()
    for node in ast.parse(text).body:
        names.update(_names_of(node))
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{name}" for part in node.body for name in _names_of(part))
    return names


def _names_of(node: ast.stmt) -> set[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case _:
            return set()


def test_the_page_names_many_modules() -> None:
    assert len(references()) > 80


@for_every(references())
def test_paths_and_names_exist(reference: tuple[str, str]) -> None:
    assert_exists(*reference)


def assert_exists(path: str, name: str) -> None:
    """Fail unless there is such a file or folder, and it defines `name`, if one is given."""
    target = ROOT / path
    assert target.is_dir() if path.endswith("/") else target.is_file(), path
    if name:
        assert name in defined_names(target.read_text("utf-8")), f"{path} does not define {name}"


def test_backticked_paths_are_all_checked() -> None:
    paths = re.findall(r"`([a-z_]+/[^`\s]*)`", prose(PAGE))
    checked = {f"{path}:{name}" if name else path for path, name in references()}
    assert {path for path in paths if path != "agent/"} <= checked


def test_hops_are_numbered_without_a_gap() -> None:
    hops = [int(number) for number in re.findall(r"^\| (\d+) \|", prose(PAGE), re.MULTILINE)]
    assert hops == list(range(1, len(hops) + 1))


@for_every(_QUESTIONS)
def test_the_index_answers(question: str) -> None:
    row = re.search(rf"^\| where {re.escape(question)}[^|]* \| (.*) \|$", prose(PAGE), re.MULTILINE)
    assert row is not None, question
    assert _REFERENCE.search(row[1]), question


def test_names_that_do_not_exist_would_be_found() -> None:
    names = defined_names("A = 1\nB: int = 2\nclass C:\n    def d(self): ...\nasync def e(): ...\n")
    assert names == {"A", "B", "C", "C.d", "e"}
    with pytest.raises(AssertionError, match="does not define"):
        assert_exists("agent/settings/load.py", "nothing")
    with pytest.raises(AssertionError):
        assert_exists("agent/nothing.py", "")


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 10_240
