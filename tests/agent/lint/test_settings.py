"""Settings in pyproject.toml, comments and arguments decide what is reported."""

from pathlib import Path

import pytest

import mp_agent
from mp_agent.errors import SettingError
from mp_agent.lint.rules import BY_CODE
from mp_agent.lint.runner import check_paths

SUM = "import torch\n\nx = torch.ones(3).half().sum(){}\ny = torch.ones(3).half().exp()\n"


def project(path: Path, table: str, **files: str) -> Path:
    (path / "pyproject.toml").write_text(f"[tool.mp-agent.check]\n{table}\n", encoding="utf-8")
    for name, text in files.items():
        file = path / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return path


def found(path: Path, **arguments: list[str]) -> list[tuple[str, str]]:
    report = check_paths(path, **arguments)  # type: ignore[arg-type]
    return [(Path(one.path).name, one.code) for one in report.findings]


def test_select_and_ignore_take_beginnings_of_codes(tmp_path: Path) -> None:
    path = project(tmp_path, "", a=SUM.format(""))
    assert found(path) == [("a.py", "MP114"), ("a.py", "MP115")]
    assert found(path, select=["MP114"]) == [("a.py", "MP114")]
    assert found(path, ignore=["MP114"]) == [("a.py", "MP115")]
    assert found(path, ignore=["MP11"]) == []


def test_settings_of_the_project_apply_by_path(tmp_path: Path) -> None:
    plain = SUM.format("")
    table = 'ignore = ["MP115"]\nexclude = ["old"]\nper-path-ignore = { "tests/*" = ["MP1"] }'
    path = project(tmp_path, table, a=plain, old__b=plain, tests__c=plain)
    assert found(path) == [("a.py", "MP114")]
    assert found(path / "a.py") == [("a.py", "MP114")]


def test_tests_may_compute_in_sixteen_bits_and_keep_losses(tmp_path: Path) -> None:
    plain = SUM.format("")
    path = project(tmp_path, "", tests__c=plain, test_a=plain, src__test_b=plain, contest=plain)
    assert {name for name, _ in found(path)} == {"contest.py"}
    assert found(path / "tests") == []
    project(tmp_path, 'per-path-ignore = { "contest.py" = ["MP1"] }')
    assert {name for name, _ in found(path)} == {"c.py", "test_a.py", "test_b.py"}
    kept = BY_CODE["MP221"].bad
    project(tmp_path, "", tests__d=kept, lib__e=kept)
    assert found(path, select=["MP221"]) == [("e.py", "MP221")]


@pytest.mark.parametrize("comment", ["ignore", "ignore[MP114]", "ignore[MP101, MP114]"])
def test_a_comment_silences_its_line(tmp_path: Path, comment: str) -> None:
    path = project(tmp_path, "", a=SUM.format(f"  # mp-agent: {comment}"))
    assert found(path) == [("a.py", "MP115")]


@pytest.mark.parametrize("comment", ["ignore[MP101]", "ignored", "ignore-file[MP101]"])
def test_another_comment_does_not(tmp_path: Path, comment: str) -> None:
    path = project(tmp_path, "", a=SUM.format(f"  # mp-agent: {comment}"))
    assert ("a.py", "MP114") in found(path)


def test_a_comment_for_the_file_silences_all_of_it(tmp_path: Path) -> None:
    path = project(tmp_path, "", a="# mp-agent: ignore-file[MP114]\n" + SUM.format(""))
    assert found(path) == [("a.py", "MP115")]


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ('select = ["MP999"]', ("select", "MP999")),
        ("ignore = 3", ("ignore", "3")),
        ("colour = true", ("colour", "True")),
        ('per-path-ignore = { "a" = ["X"] }', ("per-path-ignore", "X")),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, table: str, named: tuple[str, str]) -> None:
    with pytest.raises(SettingError) as error:
        check_paths(project(tmp_path, table))
    assert all(word in str(error.value) for word in (*named, "pyproject.toml"))


def test_a_wrong_argument_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="MP9"):
        mp_agent.check(tmp_path, select=["MP9"])
    with pytest.raises(SettingError, match="missing"):
        mp_agent.check([tmp_path / "missing"])
