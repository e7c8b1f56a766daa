"""Children of a rank are no ranks: what they do is not seen, and costs their parent nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from tests.waiting import wait_until

pytestmark = pytest.mark.long

_BEGINNING = """
import os, sys, time, torch, mp_agent

def open_here():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return found

def step():
    (weight * 2).sum().backward()
    optimizer.step()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        trained = torch.nn.Parameter(torch.ones(2))
        trained.sum().backward()
        torch.optim.SGD([trained], lr=0.1).step()
        return os.getpid()

weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
earlier = [name for name in open_here() if name.startswith("socket:")]
mp_agent.init(node_agent=sys.argv[2], run="fork-test", dir=sys.argv[1], log_dir=sys.argv[1],
              port=0, linger_seconds=600, exit_wait_seconds=0)
"""

_FORK = """
step()
child = os.fork()
if child == 0:
    for _ in range(3):
        step()
    mp_agent.observe(loss=5.0, step=1000)
    with mp_agent.phase("eval"):
        pass
    mp_agent.shutdown()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
step()
"""

_WORKERS = """
step()
sockets = {name for name in open_here() if name.startswith("socket:")}
assert sockets <= set(earlier), "workers would inherit a socket"
for _ in range(2):
    loader = torch.utils.data.DataLoader(
        Data(), num_workers=2, batch_size=2, multiprocessing_context="fork"
    )
    workers = set()
    for pids in loader:
        workers |= set(pids.tolist())
        step()
    assert len(workers) == 2 and os.getpid() not in workers
"""


def run(body: str, directory: Path, node_agent: str = "none") -> RingReader:
    command = [sys.executable, "-c", _BEGINNING + body, str(directory), node_agent]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    )
    assert result.returncode == 0, result.stderr
    run_dir = locations.run_directory(directory, "fork-test")
    (path,) = locations.find_rings(run_dir)
    reader = RingReader.open(path)
    if node_agent == "spawn":
        status = wait_until(lambda: locations.read_status(run_dir), what="the node agent")
        os.kill(status.pid, signal.SIGTERM)
        wait_until(lambda: not run_dir.exists(), what="the end of the node agent")
    return reader


@pytest.mark.slow
def test_a_forked_child_that_trains_writes_nothing(tmp_path):
    reader = run(_FORK, tmp_path)
    assert reader.state.committed_sequence == 2
    assert reader.state.end_reason is EndReason.COMPLETED
    assert reader.state.probe_errors == 0
    reader.close()


def test_the_steps_of_a_forked_child_are_not_followed(watch):
    watched = watch()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    weight.sum().backward()
    optimizer.step()
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
        finally:
            os._exit(watched.steps_reported)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    optimizer.step()
    assert watched.steps_reported == 2


@pytest.mark.slow
@pytest.mark.parametrize("node_agent", ["none", "spawn"])
def test_forked_data_workers_write_nothing_and_hold_no_socket(tmp_path, node_agent):
    reader = run(_WORKERS, tmp_path, node_agent)
    assert reader.state.committed_sequence == 9
    assert reader.state.end_reason is EndReason.COMPLETED
    reader.close()
