"""A node agent that is killed in a job's last moments: the end and the last steps are read."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mp_agent.ring import locations
from tests.agent.node.agent_process import scrape
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

_JOB = """
import os, signal, sys, time, torch, mp_agent
from pathlib import Path
from mp_agent.ring import locations

directory = Path(sys.argv[1])
mp_agent.init(run="last", dir=directory, log_dir=directory / "log", flight_records_max=0,
              port=0, bind="127.0.0.1", linger_seconds=120, exit_wait_seconds=0)
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
run_dir = locations.run_directory(directory, "last")

def agent():
    status = locations.read_status(run_dir)
    return status.pid if status and status.port and locations.agent_running(run_dir) else None

def step():
    (weight * 2).sum().backward()
    optimizer.step()

step()
while not (pid := agent()):
    time.sleep(0.05)
    step()
for _ in range(7):
    step()
os.kill(pid, signal.SIGKILL)
while locations.agent_running(run_dir):
    time.sleep(0.01)
if sys.argv[2] == "failed":
    raise RuntimeError("bad batch")
"""


@pytest.mark.parametrize("end", ["completed", "failed"])
def test_the_end_is_reported_by_an_agent_that_was_started_for_it(tmp_path: Path, end: str) -> None:
    directory = tmp_path / "shm"
    subprocess.run([sys.executable, "-c", _JOB, str(directory), end], stderr=subprocess.DEVNULL)
    run_dir = locations.run_directory(directory, "last")

    def reported() -> dict[str, float] | None:
        status = locations.read_status(run_dir)
        if status is None or not status.port or not locations.agent_running(run_dir):
            return None
        try:
            values = scrape(status)
        except OSError:
            return None
        return values if values.get("run_active") == 0 else None

    values = wait_until(reported, seconds=60, what="the end of the run")
    assert values["steps_total"] == values["rank_step{0}"] >= 8
    assert values["records_dropped_total{0}"] == 0
    status = locations.read_status(run_dir)
    assert status is not None
    _terminate(status.pid, run_dir)


def _terminate(pid: int, run_dir: Path) -> None:
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not run_dir.exists(), what="the end of the agent")
