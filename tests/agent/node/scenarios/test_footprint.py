"""What a node agent costs the machine that the job runs on."""

import os
import time
from pathlib import Path

import pytest

from mp_agent.settings import Settings
from tests.agent.node.agent_process import get, start_agent, wait_for_status
from tests.agent.node.conftest import StartRank

RANKS = 8
MEMORY_LIMIT_KIB = 60 * 1024
IDLE_LIMIT = 0.02
LAYERS = tuple(f"model.layers.{index}.self_attn.projection.weight" for index in range(1_000))


def allocated_kib(pid: int) -> int:
    """The most that a process had in memory, without the pages of files.

    Of its libraries, which the ranks share, the kernel maps as much as happens to be cached.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    most, of_files = (int(fields[name].split()[0]) for name in ("VmHWM", "RssFile"))
    return most - of_files


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def agent_of_eight_ranks(start_rank: StartRank, run_dir: Path, settings: Settings):
    """A node agent with the ranks of a node and a model of a thousand parameters."""
    for rank in [start_rank(rank, world_size=RANKS, layers=LAYERS) for rank in range(RANKS)]:
        rank.steps(50, loss=1.0)
        rank.layer_table(sum_squares=2.0)
    agent = start_agent(settings, "--run-dir", run_dir)
    yield wait_for_status(run_dir)
    agent.kill()
    agent.wait()


@pytest.mark.slow
def test_memory_stays_below_its_limit_and_torch_is_never_loaded(agent_of_eight_ranks):
    status = agent_of_eight_ranks
    for _ in range(3):
        body, _ = get(f"{status.url}/metrics")
    assert body.count(b"\nmp_agent_layer_grad_norm{") == len(LAYERS)

    assert "torch" not in Path(f"/proc/{status.pid}/maps").read_text()
    assert allocated_kib(status.pid) < MEMORY_LIMIT_KIB


@pytest.mark.slow
def test_idle_takes_a_small_share_of_one_core(agent_of_eight_ranks):
    status = agent_of_eight_ranks
    get(f"{status.url}/metrics")
    began, before = time.monotonic(), cpu_seconds(status.pid)
    time.sleep(5.0)
    share = (cpu_seconds(status.pid) - before) / (time.monotonic() - began)

    assert share < IDLE_LIMIT
