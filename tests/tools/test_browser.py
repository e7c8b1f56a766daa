"""Chromium is installed once, however many test processes look for it at the same time."""

import os
import subprocess
import sys
from pathlib import Path

APT_GET = """#!/bin/sh
case "$*" in *install*) echo >> "$0.installs";; esac
mkdir "$0.busy" || exit 100  # as apt does while another apt is at work
sleep 0.2
case "$*" in *install*) printf '#!/bin/sh\\n' > "$(dirname "$0")/chromium"
    chmod +x "$(dirname "$0")/chromium";; esac
rmdir "$0.busy"
"""

FIND = """
import os
os.geteuid = lambda: 0
from tools.browser import find_browser
print(find_browser())
"""


def test_processes_that_look_for_it_together_install_it_once(tmp_path: Path) -> None:
    bin_directory = tmp_path / "bin"
    bin_directory.mkdir()
    apt_get = bin_directory / "apt-get"
    apt_get.write_text(APT_GET)
    apt_get.chmod(0o755)
    for tool in ("sh", "mkdir", "rmdir", "sleep", "dirname", "chmod"):
        (bin_directory / tool).symlink_to(f"/bin/{tool}")
    environment = {
        **os.environ,
        "PATH": str(bin_directory),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    searches = [
        subprocess.Popen([sys.executable, "-c", FIND], env=environment, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    found = [search.communicate(timeout=60)[0].decode().strip() for search in searches]
    assert found == [str(bin_directory / "chromium")] * 3
    assert (bin_directory / "apt-get.installs").read_text() == "\n"
