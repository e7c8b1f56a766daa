"""No file ends a check: what cannot be read is listed, with its reason."""

import ast
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mp_agent.cli import main
from mp_agent.lint import analysis
from mp_agent.lint.finding import Problem
from mp_agent.lint.interpret.interpreter import trace_function
from mp_agent.lint.interpret.modules import FunctionInfo, Project
from mp_agent.lint.interpret.values import Trace
from mp_agent.lint.rules import BY_CODE, RULES
from mp_agent.lint.runner import check_paths
from tests.agent.lint.planted_code import planted

HALF = "import torch\n\n\ndef f(x):\n    return x.half().sum()\n"
LINES = [line for case in planted() for text in case.files.values() for line in text.splitlines()]


def reason(path: Path, content: bytes, name: str = "odd.py") -> str:
    (path / name).write_bytes(content)
    (skipped,) = check_paths(path).skipped
    return skipped.reason


def test_unreadable_files_are_listed_with_their_reason(tmp_path: Path) -> None:
    assert "line 2" in reason(tmp_path, b"import torch\nwith torch.autocast(: pass\n")
    assert "decoded" in reason(tmp_path, b"x = '\xff\xfe autocast'\n")
    assert "decoded" in reason(tmp_path, b"# -*- coding: no-such -*-\nautocast\n")
    assert "null" in reason(tmp_path, b"autocast\x00\n")
    assert "too deeply" in reason(tmp_path, b"autocast = " + b"-" * 100_000 + b"1\n")
    assert "bytes" in reason(tmp_path, b"# autocast\n" * 1_000_000)


def test_a_file_without_anything_to_check_is_parsed_all_the_same(tmp_path: Path) -> None:
    assert "line 2" in reason(tmp_path, b"x = 1\ndef f(:\n")
    assert "null" in reason(tmp_path, b"x = 1\0\n")
    assert "None" not in reason(tmp_path, b"x = 1\0\n")
    assert "too deeply" in reason(tmp_path, b"x = " + b"-" * 100_000 + b"1\n")


def test_what_python_warns_of_in_a_file_is_no_concern_of_a_check(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("x = '\\d'\n")
    (tmp_path / "of_torch.py").write_text("import torch\nx = '\\d' + str(torch.autocast)\n")
    assert check_paths(tmp_path).skipped == ()


def test_a_notebook_that_is_none_is_listed(tmp_path: Path) -> None:
    for content in (b"{}", b"[", b'{"cells": 1}', b'{"cells": [{"cell_type": "code"}]}'):
        assert "notebook" in reason(tmp_path, content, "odd.ipynb")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1", "cp1252"])
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_any_encoding_and_line_ending_keeps_positions(
    tmp_path: Path, encoding: str, ending: str
) -> None:
    text = HALF if encoding == "utf-8-sig" else f"# coding: {encoding} é\n{HALF}"
    (tmp_path / "a.py").write_bytes(text.replace("\n", ending).encode(encoding))
    (finding,) = check_paths(tmp_path).findings
    assert (finding.code, finding.span.column) == ("MP114", 11)
    assert finding.span.line == text.split("\n").index("    return x.half().sum()") + 1


def test_columns_count_characters(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\n\nä = ('äöü', torch.ones(3).half().sum())\n")
    (finding,) = check_paths(tmp_path).findings
    assert finding.span.column == len("ä = ('äöü', ")


def test_form_feeds_end_no_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import torch\n\x0c\ny = '\x1c\x85\u2028'\nz = torch.ones(3).half().sum()\n"
    )
    (finding,) = check_paths(tmp_path).findings
    assert finding.span.line == 4


def test_folders_that_link_to_themselves_and_special_files_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "a.py").write_text(HALF)
    report = check_paths(tmp_path)
    assert report.counts() == {"MP114": 1}
    assert {Path(one.path).name for one in report.skipped} == {"gone.py", "pipe.py"}


def test_modules_that_import_each_other_and_classes_that_inherit_in_a_circle(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.py").write_text(
        "from b import B, half\n\n\nclass A(B):\n    pass\n\n\nA().half()\n"
    )
    (tmp_path / "b.py").write_text(
        "from a import A, half\n\n\nclass B(A):\n    pass\n\n\nB().half()\n"
    )
    assert not check_paths(tmp_path).skipped


def test_a_function_that_calls_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import torch\n\n\ndef f(x):\n    x.half().sum()\n    return f(f(x).half())\n\n\n"
        "f(torch.ones(1))\n"
    )
    assert check_paths(tmp_path).counts() == {"MP114": 1}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_shuffled_lines_never_end_the_check(seed: int, tmp_path: Path) -> None:
    shuffled = random.Random(seed)
    lines = [shuffled.choice(LINES) for _ in range(30)]
    kept: list[str] = []
    for line in lines:
        try:
            ast.parse("\n".join([*kept, line]))
        except SyntaxError:
            continue
        kept.append(line)
    (tmp_path / "a.py").write_text("\n".join(kept) + "\n", encoding="utf-8")
    report = check_paths(tmp_path)
    assert not report.skipped
    assert {finding.code for finding in report.findings} <= {rule.code for rule in RULES}


def test_a_notebook_is_checked_by_cell(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# half\n"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "import torch\n", "!ls"]},
        {"cell_type": "code", "source": "%%bash\nls (\n"},
        {"cell_type": "code", "source": "x = torch.ones(3)\nx.half().sum()"},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    (finding,) = check_paths(tmp_path).findings
    assert (finding.code, finding.cell, finding.span.line) == ("MP114", 3, 2)


def test_a_notebook_below_the_working_folder_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [{"cell_type": "code", "source": "import torch\nx = torch.ones(3).half().sum()"}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    monkeypatch.chdir(tmp_path)
    assert [(one.path, one.code) for one in check_paths("a.ipynb").findings] == [
        ("a.ipynb", "MP114")
    ]
    assert [one.path for one in check_paths(".").findings] == ["a.ipynb"]


def test_lines_of_a_notebook_that_are_no_python_are_left_out(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "code", "source": "!pip install \\\n    torch (\nfiles = !ls\nhelp?\n%pwd"},
        {"cell_type": "code", "source": "%%time\nimport torch\nx = torch.ones(3).half().sum()"},
        {
            "cell_type": "code",
            "source": "print('%d ('\n  % len('a'))\ny = torch.ones(3).half().sum()",
        },
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    report = check_paths(tmp_path)
    assert not report.skipped
    assert [(one.cell, one.span.line) for one in report.findings] == [(2, 3), (3, 3)]


def test_texts_of_several_lines_and_blank_lines_hide_no_magic(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "code", "source": "\n%%bash\nfor x in (\n"},
        {
            "cell_type": "code",
            "source": 'def f(x):\n    """It\'s odd (\n    %d\n    """\n    return x\n!pip install',
        },
        {
            "cell_type": "code",
            "source": "a, b = !ls (\n%cd /tmp\nimport torch\nx = torch.ones(3).half().sum()",
        },
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    report = check_paths(tmp_path)
    assert not report.skipped
    assert [(one.cell, one.span.line) for one in report.findings] == [(3, 4)]


def _failing(monkeypatch: pytest.MonkeyPatch, code: str, error: Exception) -> None:
    """Let a rule raise on functions called `broken`."""

    def find(trace: Trace) -> Iterator[Problem]:
        if ":broken:" in trace.name:
            raise error
        yield from rule.find(trace)

    rule = BY_CODE[code]
    rules = tuple(replace(one, find=find) if one is rule else one for one in RULES)
    monkeypatch.setattr(analysis, "RULES", rules)


TWO_RULES = """\
import torch
from torch.cuda.amp import autocast

def broken(x):
    with autocast():
        return x.half().sum()

def well(x):
    return x.half().sum()
"""


def test_a_rule_that_raises_stops_neither_the_others_nor_itself_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(TWO_RULES)
    before = check_paths(tmp_path)
    _failing(monkeypatch, "MP114", TypeError("no such operand"))
    report = check_paths(tmp_path)
    kept = [one for one in before.findings if one.code != "MP114" or one.span.line > 6]
    assert list(report.findings) == kept
    assert {one.code for one in kept} == {"MP112", "MP114"}
    assert not report.skipped
    (error,) = report.errors
    assert (error.path, error.rule) == (str(tmp_path / "a.py"), "MP114")
    assert error.reason.startswith("broken:4: TypeError: no such operand (test_robustness.py:")


def test_an_analysis_that_raises_leaves_the_other_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(function: FunctionInfo, project: Project, followed: set[str]) -> Trace:
        if function.qualified_name == "broken":
            raise KeyError("node")
        return trace_function(function, project, followed)

    monkeypatch.setattr(analysis, "trace_function", trace)
    (tmp_path / "a.py").write_text(TWO_RULES)
    report = check_paths(tmp_path)
    assert [one.span.line for one in report.findings if one.code == "MP114"] == [9]
    (error,) = report.errors
    assert error.message.startswith("internal error of the analysis: broken: KeyError: 'node'")


def test_code_that_is_nested_too_deeply_is_no_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing(monkeypatch, "MP114", RecursionError())
    (tmp_path / "a.py").write_text(TWO_RULES)
    report = check_paths(tmp_path)
    assert not report.errors
    assert [one.reason for one in report.skipped] == ["nested too deeply"]


@pytest.mark.parametrize("output", ["text", "json", "sarif", "github"])
def test_an_internal_error_is_in_every_report_and_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    _failing(monkeypatch, "MP114", TypeError("no such operand"))
    (tmp_path / "a.py").write_text(TWO_RULES)
    command = ["check", str(tmp_path), "--format", output, "--jobs", "1", "--exit-zero"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 3
    assert "no such operand" in result.stdout
    assert "MP112" in result.stdout
    if output == "sarif":
        (invocation,) = json.loads(result.stdout)["runs"][0]["invocations"]
        assert invocation["executionSuccessful"] is False


STEP = """
def step_NUMBER(model_NUMBER, batch, optimizer):
    out = model_NUMBER(batch["x_NUMBER"])
    loss = torch.nn.functional.cross_entropy(out, batch["y"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_work_grows_with_the_length_of_a_file_and_not_with_its_square(tmp_path: Path) -> None:
    calls: dict[int, int] = {}
    for functions in (50, 200):
        directory = tmp_path / f"{functions}"
        directory.mkdir()
        steps = (STEP.replace("NUMBER", str(number)) for number in range(functions))
        (directory / "a.py").write_text("import torch\n" + "".join(steps))
        calls[functions] = 0

        def count(*_: object, functions: int = functions) -> None:
            calls[functions] += 1

        sys.setprofile(count)
        try:
            check_paths(directory)
        finally:
            sys.setprofile(None)
    assert calls[200] < 5 * calls[50]
