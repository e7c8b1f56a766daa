"""A main script is checked with what it imports of its project, within limits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mp_agent.lint.rules.scaling import CLIP_WITHOUT_UNSCALE
from mp_agent.lint.script import CPU_SECONDS_MAX, MEMORY_BYTES_MAX, check_script, summary

HALF = "import torch\n\n\ndef f(x):\n    return x.half().sum()\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A script whose mistakes are in other files, one of them two imports away."""
    (tmp_path / "train.py").write_text("import cli\nimport torch\n\ncli.main()\n")
    (tmp_path / "cli.py").write_text("from package import loop\n\n\ndef main():\n    loop.run()\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "loop.py").write_text(CLIP_WITHOUT_UNSCALE.bad)
    (tmp_path / "unrelated.py").write_text(HALF)
    return tmp_path


def process(script: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mp_agent.lint.script", str(script)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_files_that_the_script_imports_are_checked_and_no_others(project: Path) -> None:
    report = check_script(str(project / "train.py"))
    assert report.files == 4
    assert report.counts() == {"MP106": 1}
    assert {one.path for one in report.findings} == {str(project / "package" / "loop.py")}


def test_at_most_so_many_files_are_checked_the_nearest_first(project: Path) -> None:
    report = check_script(str(project / "train.py"), files_max=2)
    assert (report.files, report.counts()) == (2, {})


def test_comments_and_settings_of_the_project_silence_findings(project: Path) -> None:
    settings = project / "pyproject.toml"
    settings.write_text("[tool.mp-agent.check]\nignore = ['MP106']\n")
    assert check_script(str(project / "train.py")).counts() == {}
    settings.write_text("[tool.mp-agent.check]\nexclude = ['package', 'train.py']\n")
    report = check_script(str(project / "train.py"))
    assert (report.files, report.counts()) == (2, {})


def test_the_process_prints_counts_and_lines(project: Path) -> None:
    done = process(project / "train.py")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["files"], printed["counts"]) == (4, {"MP106": 1})
    (line,) = printed["findings"]
    assert line.startswith(f"{project / 'package' / 'loop.py'}:6: MP106 ")
    assert printed["problems"] == []


def test_long_output_is_cut(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n" + "x.half().sum()\n" * 50)
    (tmp_path / "train.py").write_text(
        "import torch\n\n\ndef f(x):\n" + "    x.half().sum()\n" * 50
    )
    report = check_script(str(tmp_path / "train.py"))
    assert len(report.findings) == 50
    short = summary(report)
    assert len(short["findings"]) == 20 and short["counts"] == {"MP114": 50}
    assert max(map(len, short["findings"])) <= 300


def test_what_cannot_be_checked_is_said(project: Path) -> None:
    missing = process(project / "gone.py")
    assert missing.returncode == 1 and "gone.py is not a file here" in missing.stderr
    (project / "pyproject.toml").write_text("[tool.mp-agent.check]\nselect = ['X']\n")
    wrong = process(project / "train.py")
    assert wrong.returncode == 1 and "tool.mp-agent.check" in wrong.stderr
    (project / "pyproject.toml").unlink()
    (project / "cli.py").write_text("import torch\nwith autocast(\n")
    broken = json.loads(process(project / "train.py").stdout)
    assert broken["files"] == 1
    assert "cli.py: not checked: line 2" in broken["problems"][0]


def test_the_process_limits_itself_and_imports_no_torch(project: Path) -> None:
    script = f"""
import os, resource, sys
from mp_agent.lint import script
assert script.main([{str(project / "train.py")!r}]) == 0
assert "torch" not in sys.modules
assert os.nice(0) == 19
assert resource.getrlimit(resource.RLIMIT_CPU)[0] == {CPU_SECONDS_MAX}
assert resource.getrlimit(resource.RLIMIT_AS)[0] == {MEMORY_BYTES_MAX}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
