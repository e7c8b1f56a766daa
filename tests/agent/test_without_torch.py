"""What needs no torch works where there is none, and `import mp_agent` loads next to nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "pydantic", "msgspec", "aiohttp", "click", "rich", "prometheus_client")

NO_TORCH = "import sys; sys.modules['torch'] = None\n"
"""Every import of torch then raises, as where it is not installed."""


def python(code: str, *arguments: str, directory: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        text=True,
        capture_output=True,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".editable")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    run = "from mp_agent.cli import main; sys.argv[0] = 'mp-agent'; main()"
    assert python(NO_TORCH + run, *arguments, directory=tmp_path)


def test_what_needs_torch_says_so_and_the_program_goes_on(tmp_path):
    code = NO_TORCH + "import mp_agent; mp_agent.init(); mp_agent.observe(loss=1.0); print('on')"
    assert python(code, directory=tmp_path) == "on\n"
