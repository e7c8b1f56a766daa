import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.host_name import host_name_problem

ROOT = Path(__file__).parents[2]


def test_a_machine_that_can_run_torchrun_has_no_problem():
    assert host_name_problem() is None


def test_a_host_name_that_does_not_resolve_ends_the_tests_at_once_in_one_line():
    """In a UTS namespace of its own, where the host name is another one."""
    unshare = [shutil.which("unshare") or "unshare", "--uts", "--map-root-user", "sh", "-c"]
    if subprocess.run([*unshare, "hostname nowhere.invalid"], capture_output=True).returncode:
        pytest.skip("this user may not make a UTS namespace")
    tests = f"{sys.executable} -m pytest -q -p no:cacheprovider tests/e2e/test_ends.py"
    ran = subprocess.run(
        [*unshare, f"hostname nowhere.invalid && exec {tests}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == pytest.ExitCode.INTERRUPTED
    lines = [line for line in ran.stdout.splitlines() if "does not resolve" in line]
    assert len(lines) == 1
    assert "'nowhere.invalid'" in lines[0]
    assert "/etc/hosts" in lines[0]
