import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.host_name import host_name_problem

ROOT = Path(__file__).parents[2]
OF_ANOTHER_MACHINE = "192.0.2.1 nowhere.invalid\n"


def test_a_machine_that_can_run_torchrun_has_no_problem():
    assert host_name_problem() is None


@pytest.mark.parametrize("hosts", ["", OF_ANOTHER_MACHINE])
def test_a_host_name_that_is_not_this_machines_ends_the_tests_at_once_in_one_line(hosts, tmp_path):
    """In namespaces of its own, where the host name and /etc/hosts are others."""
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    renamed = f"mount --bind {tmp_path}/hosts /etc/hosts && hostname nowhere.invalid"
    unshare = [shutil.which("unshare") or "unshare", "--uts", "--mount", "--map-root-user"]
    if subprocess.run([*unshare, "sh", "-c", renamed], capture_output=True).returncode:
        pytest.skip("this user may not make UTS and mount namespaces")
    tests = f"{sys.executable} -m pytest -q -p no:cacheprovider tests/e2e/test_ends.py"
    ran = subprocess.run(
        [*unshare, "sh", "-c", f"{renamed} && exec {tests}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if "XDIST" not in name},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == pytest.ExitCode.INTERRUPTED
    lines = [line for line in ran.stdout.splitlines() if "does not resolve" in line]
    assert len(lines) == 1
    assert "'nowhere.invalid'" in lines[0]
    assert "/etc/hosts" in lines[0]
