"""One node agent beside the jobs, for all runs of a directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mp_agent.ring import locations
from tests.agent.node.agent_process import StartAgent, get, scrape, wait_for_status
from tests.agent.node.conftest import StartRank
from tests.agent.node.fake_rank import FakeRank
from tests.waiting import wait_until


@pytest.fixture
def other(run_dir: Path) -> Iterator[FakeRank]:
    with FakeRank(locations.run_directory(run_dir.parent, "bert"), run="bert") as rank:
        yield rank


@pytest.mark.slow
def test_runs_come_and_go_while_it_serves_them_all(
    start: StartAgent, start_rank: StartRank, run_dir: Path, other: FakeRank
):
    rank = start_rank()
    agent = start("--dir", run_dir.parent, linger_seconds=0.0)
    status = wait_for_status(run_dir)
    body = get(f"{status.url}/metrics")[0].decode()
    assert 'mp_agent_run_active{run="bert"} 1.0' in body
    assert 'mp_agent_run_active{run="llama"} 1.0' in body

    rank.kill()
    wait_until(lambda: not run_dir.exists(), what="the end of one run")
    body = get(f"{status.url}/metrics")[0].decode()
    assert 'mp_agent_run_active{run="bert"} 1.0' in body
    assert 'run="llama"' not in body

    other.kill()
    wait_until(lambda: list(run_dir.parent.iterdir()) == [], what="the end of the other")
    agent.terminate()
    assert agent.wait(10) == 0


@pytest.mark.slow
def test_a_bad_ring_of_one_run_does_not_hide_the_others(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    bad = run_dir.parent / "broken-00000000" / "x-0" / "rank0.ring"
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"MPAGRING" + b"\xff" * 5000)
    start_rank().steps(1)
    start("--dir", run_dir.parent)

    assert scrape(wait_for_status(run_dir))["steps_total"] == 1
