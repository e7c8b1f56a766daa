"""What needs no torch works where there is none, and `import mp_agent` loads next to nothing."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mp_agent.version import TORCH_MINIMUM

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "pydantic", "msgspec", "aiohttp", "click", "rich", "prometheus_client")

NO_TORCH = "import sys; sys.modules['torch'] = None\n"
"""Every import of torch then raises, as where it is not installed."""


RUN_COMMAND = "from mp_agent.cli import main; sys.argv[0] = 'mp-agent'; main()"


def python(code: str, *arguments: str, directory: Path | None = None) -> str:
    done = finished(code, *arguments, directory=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


def finished(
    code: str, *arguments: str, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        text=True,
        capture_output=True,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".editable")},
    )


def test_importing_the_package_loads_nothing_heavy():
    loaded = python("import mp_agent, sys; print(*sys.modules)").split()
    assert "mp_agent" in loaded
    assert not set(HEAVY) & set(loaded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("rules",),
        ("dashboards", "--help"),
        ("postmortem", "--help"),
        ("export", "--help"),
        ("top", "--help"),
        ("node", "--help"),
        ("--help",),
    ],
    ids=" ".join,
)
def test_a_command_works_without_torch(arguments, tmp_path):
    assert python(NO_TORCH + RUN_COMMAND, *arguments, directory=tmp_path)


OLD_TORCH = "import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n" + (
    "sys.modules['torch'].__version__ = '2.5.1+cpu'\n"
)
PROBLEMS = {
    NO_TORCH: "none is installed: pip install 'mp-agent[torch]'",
    OLD_TORCH: "2.5.1+cpu is installed",
}


@pytest.mark.slow
@pytest.mark.parametrize("torch", PROBLEMS, ids=["absent", "too old"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "script.py:make"),
        ("recommend", "script.py:make"),
        ("evaluate", "script.py:make", "--precision", "bf16-autocast"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_that_needs_torch_names_the_problem_and_ends_with_2(torch, arguments, tmp_path):
    (tmp_path / "script.py").write_text("def make(): return 1\n")
    done = finished(torch + RUN_COMMAND, *arguments, directory=tmp_path)
    problem = f"torch 2.6 or newer is needed, and {PROBLEMS[torch]}"
    assert done.stderr == f"mp-agent {arguments[0]}: {problem}\n"
    assert done.returncode == 2


@pytest.mark.parametrize("torch", PROBLEMS, ids=["absent", "too old"])
def test_init_names_the_problem_in_a_line_and_the_program_goes_on(torch, tmp_path):
    code = "import mp_agent; mp_agent.init(); mp_agent.observe(loss=1.0); print('on')"
    done = finished(torch + code, directory=tmp_path)
    assert (done.returncode, done.stdout) == (0, "on\n")
    problem = f"torch 2.6 or newer is needed, and {PROBLEMS[torch]}"
    assert done.stderr == f"{problem}; training goes on unwatched\n"


def test_the_extra_asks_for_the_torch_that_is_checked_for():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["optional-dependencies"]["torch"] == [
        f"torch>={'.'.join(map(str, TORCH_MINIMUM))}"
    ]
    assert not any(name.startswith("torch") for name in project["dependencies"])
