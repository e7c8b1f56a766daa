"""A running job of two nodes is dumped through the command, and goes on as if nothing had been."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from mp_agent.flight.record.evidence import load
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from tests.agent.flight.jobs import JOB
from tests.waiting import wait_until
from tools.jobs import is_node_agent
from tools.servers.running import free_port, stop

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

RUN = "two-nodes"


@contextmanager
def two_nodes(directory: Path) -> Iterator[list[Path]]:
    """Run the endless job, one rank on each of two nodes; yield their runs' directories."""
    port, nodes, run_dirs = free_port(), [], []
    try:
        for number in range(2):
            place = directory / f"node{number}"
            place.mkdir()
            run_dirs.append(locations.run_directory(place / "shm", RUN))
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node-rank", str(number), "--nproc-per-node", "1"),
                *("--master-addr", "127.0.0.1", "--master-port", str(port)),
                *(str(JOB), str(place)),
            ]
            settings = {
                "MP_AGENT_RUN": RUN,
                "MP_AGENT_DIR": str(place / "shm"),
                "MP_AGENT_LOG_DIR": str(place / "log"),
                "MP_AGENT_FLIGHT_DIR": str(directory / "flight"),
                "MP_AGENT_FLIGHT_STEPS": "30",
                "MP_AGENT_LINGER_SECONDS": "1",
                "MP_AGENT_PUSH_INTERVAL_SECONDS": "0.5",
                "MP_AGENT_PORT": "0",
                "MP_AGENT_BIND": "127.0.0.1",
                "OMP_NUM_THREADS": "1",
            }
            with (place / "job.log").open("wb") as log:
                nodes.append(
                    subprocess.Popen(
                        command, env={**os.environ, **settings}, stdout=log, stderr=log
                    )
                )
        yield run_dirs
    finally:
        agents = [status.pid for d in run_dirs if (status := locations.read_status(d))]
        for node in nodes:
            stop(node, seconds=30)
        for pid in agents:
            with suppress(AssertionError):
                wait_until(partial(_is_gone, pid), seconds=20)
            if is_node_agent(pid):
                os.kill(pid, 9)


def _is_gone(pid: int) -> bool:
    return not is_node_agent(pid)


def committed(run_dir: Path) -> int:
    rings = locations.find_rings(run_dir)
    if not rings:
        return 0
    reader = RingReader.open(rings[0])
    try:
        return reader.state.committed_sequence
    finally:
        reader.close()


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mp_agent", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_running_job_is_recorded_on_all_its_nodes_at_the_same_steps(tmp_path):
    with two_nodes(tmp_path) as run_dirs:
        wait_until(
            lambda: all(committed(d) > 60 and locations.agent_running(d) for d in run_dirs),
            seconds=90,
            what="60 steps on both nodes",
        )
        dumped = command("dump", "--run", RUN, "--dir", run_dirs[0].parent)
        assert dumped.returncode == 0, dumped.stderr
        path = Path(dumped.stdout.strip())
        other = path.with_name("node1.npz")
        wait_until(other.exists, seconds=30, what="the record of the other node")
        before = committed(run_dirs[0])
        wait_until(lambda: committed(run_dirs[0]) > before + 5, what="further steps")

        evidence = load(path.parent)
        assert [log.identity.node_rank for log in evidence.ranks] == [0, 1]
        windows = [
            [step.sequence for segment in log.segments for step in segment.steps]
            for log in evidence.ranks
        ]
        # The step under way when the record was asked for may be complete on one of them alone.
        assert windows[0][0] == windows[1][0] and abs(len(windows[0]) - len(windows[1])) <= 1
        assert 29 <= len(windows[0]) <= 30
        assert all(log.end is EndReason.RUNNING for log in evidence.ranks)
        report = command("postmortem", path.parent)
        assert report.returncode == 0, report.stderr
        assert "Nothing found" in report.stdout
    left = [run_dir for run_dir in run_dirs if run_dir.exists()]
    assert left == []
