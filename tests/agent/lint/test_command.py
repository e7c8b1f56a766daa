"""`mp-agent check` as its user runs it: formats, exit codes, messages."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from mp_agent.cli import main
from mp_agent.lint.rules import RULES

BAD = "import torch\n\n\ndef f(x):\n    return x.half().sum()\n"
_REGION = {
    "type": "object",
    "required": ["startLine", "startColumn", "endLine", "endColumn"],
    "additionalProperties": {"type": "integer", "minimum": 1},
}
_RESULT = {
    "type": "object",
    "required": ["ruleId", "ruleIndex", "level", "message", "locations"],
    "properties": {
        "level": {"enum": ["none", "note", "warning", "error"]},
        "message": {"type": "object", "required": ["text"]},
        "locations": {
            "type": "array",
            "minItems": 1,
            "items": {
                "required": ["physicalLocation"],
                "properties": {
                    "physicalLocation": {
                        "required": ["artifactLocation", "region"],
                        "properties": {"region": _REGION},
                    }
                },
            },
        },
        "fixes": {"items": {"required": ["artifactChanges"]}},
    },
}
SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "items": {
                "required": ["tool", "results"],
                "properties": {
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "results": {"items": _RESULT},
                },
            }
        },
    },
}
"""What sections 3.13 to 3.30 of the standard require of the parts that are written."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD, encoding="utf-8")
    return tmp_path


def check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments])


def test_a_check_of_nothing_says_so_on_standard_error(folder: Path) -> None:
    (folder / "empty").mkdir()
    result = check("empty", "--format", "json")
    assert result.exit_code == 0 and json.loads(result.stdout)
    assert "no Python file or notebook was found in empty" in result.stderr
    assert "no Python file" not in check("bad.py").stderr


def test_text_shows_place_source_and_remedy(folder: Path) -> None:
    result = check()
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "bad.py:5:12: MP114 a reduction in float16: the result overflows, or drops what is small "
        "against it",
        "     5 |     return x.half().sum()",
        "       |            ^^^^^^^^^^^^^^",
        "    → Reduce in FP32: `x.float().sum()` or `x.sum(dtype=torch.float32)`. Where a long sum "
        "must stay in 16 bits, sum it in chunks and those in FP32: "
        "`sum(part.sum().float() for part in x.split(256))`.",
        "1 finding in 1 file.",
    ]


def test_exit_codes(folder: Path) -> None:
    assert check("bad.py").exit_code == 1
    assert check("--exit-zero").exit_code == 0
    assert check("--ignore", "MP114").exit_code == 0
    for arguments in (["missing.py"], ["--select", "MP9"], ["--explain", "X1"], ["--jobs", "0"]):
        result = check(*arguments)
        assert result.exit_code == 2 and arguments[-1] in result.output
    (folder / "broken.py").write_text("autocast = (\n")
    result = check("broken.py")
    assert result.exit_code == 1 and "broken.py: not checked: line 1" in result.output


def test_json_counts_from_one(folder: Path) -> None:
    document = json.loads(check("--format", "json").stdout)
    (finding,) = document["findings"]
    assert document["counts"] == {"MP114": 1} and document["files"] == 1
    assert (finding["line"], finding["column"], finding["end_column"]) == (5, 12, 26)
    assert finding["alert"] == "MpAgentLossNonFinite" and not finding["fixable"]


def test_sarif_has_the_shape_that_code_hosts_read(folder: Path) -> None:
    (folder / "broken.py").write_text("autocast = (\n")
    (folder / "a b.py").write_text("import torch\n\nx = torch.cuda.amp.autocast()\n")
    document = json.loads(check("--format", "sarif").stdout)
    jsonschema.validate(document, SARIF)
    (run,) = document["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [one.code for one in RULES]
    assert [one["ruleId"] for one in run["results"]] == ["MP112", "MP114"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    where = run["results"][0]["locations"][0]["physicalLocation"]
    assert where["artifactLocation"]["uri"] == "a%20b.py"
    (notification,) = run["invocations"][0]["toolExecutionNotifications"]
    assert "not checked" in notification["message"]["text"]


def test_github_annotations_show_what_a_terminal_would_obey_by_escapes(folder: Path) -> None:
    name = "\x1b[31m\u202egnp.py"
    (folder / name).write_text("import torch\nwith torch.cuda.amp.autocast():\n    pass\n")
    output = check("--format", "github").stdout
    assert r"\x1b[31m\u202egnp.py" in output
    assert not set(output) & set("\x1b\u202e")


def test_a_line_end_in_a_name_makes_no_line_of_the_report(folder: Path) -> None:
    (folder / "a\nb.py").write_text("import torch\nwith torch.cuda.amp.autocast():\n    pass\n")
    (folder / "c\nd.py").write_text("import torch\nautocast(\n")
    output = check().stdout
    assert r"a\nb.py:2:6: MP112" in output.replace("\n", "")
    assert not any(line.startswith(("b.py", "d.py")) for line in output.splitlines())


def test_github_annotations_escape_what_would_end_them(folder: Path) -> None:
    (folder / "a,b%.py").write_text(BAD)
    first = check("--format", "github").stdout.splitlines()[0]
    assert first.startswith(
        "::warning file=a%2Cb%25.py,line=5,endLine=5,col=12,endColumn=26,title="
    )
    assert first.endswith(
        "::a reduction in float16: the result overflows, or drops what is small against it"
    )


def test_a_report_is_written_to_a_file(folder: Path) -> None:
    assert check("--output", "report.txt").stdout == ""
    assert "MP114" in (folder / "report.txt").read_text()


def test_fix_repairs_and_reports_the_rest(folder: Path) -> None:
    (folder / "bad.py").write_text(BAD + "\n\ntorch.autograd.set_detect_anomaly(True)\n")
    result = check("--fix")
    assert result.exit_code == 1
    assert "1 fixed" in result.stderr and "MP118" not in result.stdout
    assert (folder / "bad.py").read_text() == BAD + "\n\ntorch.autograd.set_detect_anomaly(False)\n"


def test_explain_shows_both_examples() -> None:
    for rule in RULES:
        output = check("--explain", rule.code.lower()).output
        assert rule.remedy in output and rule.bad.splitlines()[0] in output


@pytest.mark.slow
def test_several_processes_find_the_same(folder: Path) -> None:
    for number in range(230):
        (folder / f"m{number}.py").write_text(BAD if number % 3 else "x = 1\n")
    command = [sys.executable, "-m", "mp_agent", "check", "--format", "json", "--jobs"]
    one, two = (
        subprocess.run([*command, jobs], capture_output=True, text=True, cwd=folder, check=False)
        for jobs in ("1", "2")
    )
    assert one.stdout == two.stdout and json.loads(one.stdout)["counts"] == {"MP114": 154}
    assert not two.stderr


def test_the_check_imports_neither_torch_nor_the_telemetry() -> None:
    program = (
        "import sys, mp_agent; mp_agent.check('.', select=['MP101']);"
        "print([name for name in ('torch', 'aiohttp', 'mp_agent.node') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    assert done.stdout.strip() == "[]"
