"""Processes that share work end with the command that began them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mp_agent.inputs.workers import worker_processes
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def busy(folder: Path, _: int) -> None:
    """Leave this process's number in a folder, and work for long."""
    (folder / str(os.getpid())).touch()
    time.sleep(600)


def ended(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def test_workers_end_at_once_where_the_block_raises(tmp_path: Path) -> None:
    """Without a traceback of the pool's thread, which would fail the test as a warning."""
    with pytest.raises(KeyboardInterrupt), worker_processes(2) as pool:
        for number in range(10):
            pool.submit(busy, tmp_path, number)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, what="two workers")
        raise KeyboardInterrupt
    workers = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(lambda: all(map(ended, workers)), what="the end of the workers")


def test_workers_of_a_command_that_is_killed_end_too(tmp_path: Path) -> None:
    script = (
        "import sys; from functools import partial; from pathlib import Path\n"
        "from mp_agent.inputs.workers import worker_processes\n"
        "from tests.agent.inputs.test_workers import busy\n"
        "with worker_processes(2) as pool:\n"
        "    list(pool.map(partial(busy, Path(sys.argv[1])), range(10)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) as command:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, what="two workers")
        command.send_signal(signal.SIGKILL)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(lambda: all(map(ended, workers)), what="the end of the workers")
