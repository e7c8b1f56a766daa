"""Real node agents that are asked to end, or whose parent is gone."""

import os
import signal
from pathlib import Path

import pytest

from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.agent_process import (
    StartAgent,
    scrape,
    start_agent,
    wait_for_end,
    wait_for_status,
)
from tests.agent.node.conftest import StartRank
from tests.waiting import wait_until


@pytest.mark.slow
def test_asked_to_stop_with_its_job_it_stays_until_the_end_was_scraped(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    rank = start_rank()
    agent = start("--dir", run_dir.parent)
    status = wait_for_status(run_dir)
    scrape(status)
    agent.terminate()
    rank.kill()
    wait_for_end(run_dir)

    assert agent.wait(10) == 0
    assert not run_dir.exists()


@pytest.mark.slow
def test_asked_twice_it_stops_at_once_and_leaves_the_run_to_its_successor(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    start_rank().steps(4)
    agent = start("--dir", run_dir.parent)
    scrape(wait_for_status(run_dir))
    agent.terminate()
    agent.send_signal(signal.SIGINT)
    assert agent.wait(10) == 0

    successor = start("--dir", run_dir.parent)
    status = wait_for_status(run_dir, pid=successor.pid)
    assert scrape(status)["steps_total"] == 4


@pytest.mark.slow
def test_it_does_not_outlive_a_supervisor_that_is_killed(
    run_dir: Path, settings: Settings, start_rank: StartRank
):
    rank = start_rank()
    supervisor = os.fork()
    if supervisor == 0:
        start_agent(settings, "--dir", run_dir.parent, "--with-parent")
        signal.pause()
    status = wait_for_status(run_dir)
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    rank.kill()

    wait_until(lambda: not Path(f"/proc/{status.pid}").exists(), what="the agent's end")
    assert not run_dir.exists()


@pytest.mark.slow
def test_on_sigterm_a_spawned_agent_exits_at_once_and_keeps_what_its_successor_needs(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    start_rank().steps(2)
    agent = start()
    wait_for_status(run_dir)
    agent.terminate()

    assert agent.wait(10) == 0
    assert locations.find_rings(run_dir)
    assert locations.ledger_path(run_dir).exists()
