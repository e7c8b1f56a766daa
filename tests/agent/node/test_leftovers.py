"""What killed jobs leave behind, and who clears it away."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mp_agent.node import leftovers
from mp_agent.node.leftovers import clear_leftovers
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.agent_process import StartAgent, scrape, wait_for_status
from tests.agent.node.conftest import StartRank
from tests.agent.node.fake_rank import FakeRank
from tests.waiting import wait_until


@pytest.fixture
def killed(settings: Settings) -> Path:
    """Return the directory of a run whose ranks and node agent were killed, some time ago."""
    run_dir = locations.run_directory(settings.dir, "killed")
    with FakeRank(run_dir, run="killed") as rank:
        rank.steps(5)
    locations.agent_lock_path(run_dir).touch(mode=0o600)
    (run_dir / ".ledger.json.4711").touch(mode=0o600)
    _make_older(run_dir)
    return run_dir


def _make_older(run_dir: Path) -> None:
    long_ago = time.time() - 100
    for path in (run_dir, *run_dir.rglob("*")):
        os.utime(path, (long_ago, long_ago))


def test_a_killed_job_is_cleared_and_what_was_never_read_is_logged(killed: Path, caplog):
    clear_leftovers(killed.parent)

    assert not killed.exists()
    assert "5 step(s) were never read" in caplog.text


def test_what_has_just_changed_is_left_to_a_job_that_may_be_starting(killed: Path):
    (killed / "root.json").touch()
    clear_leftovers(killed.parent)

    assert killed.exists()


def test_a_run_with_a_live_rank_or_agent_or_without_a_ring_yet_is_left_alone(settings: Settings):
    with_rank = locations.run_directory(settings.dir, "rank")
    with_agent = locations.run_directory(settings.dir, "agent")
    with FakeRank(with_rank, run="rank") as rank, FakeRank(with_agent, run="agent") as other:
        rank.steps(1)
        lock_fd = locations.hold_agent_lock(with_agent)
        assert lock_fd is not None
        other.kill()
        for run_dir in (with_rank, with_agent):
            _make_older(run_dir)
        clear_leftovers(settings.dir)
        os.close(lock_fd)

        assert locations.find_rings(with_rank)
        assert locations.find_rings(with_agent)


def test_a_ring_that_cannot_be_read_and_a_planted_link_are_cleared_too(killed: Path, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("x")
    (ring,) = locations.find_rings(killed)
    ring.write_bytes(b"garbage")
    (ring.parent / "rank1.ring").symlink_to(precious)
    _make_older(killed)
    clear_leftovers(killed.parent)

    assert not killed.exists()
    assert precious.read_text() == "x"


def test_a_supervised_job_that_was_killed_is_cleared_and_a_live_one_is_not(settings: Settings):
    dead, alive = settings.dir / "exec-dead", settings.dir / "exec-alive"
    for directory in (dead, alive):
        directory.mkdir(mode=0o700, parents=True)
        with FakeRank(locations.run_directory(directory, "run"), run="run") as rank:
            rank.steps(1)
    lock_fd = leftovers.hold_supervisor_lock(alive)
    assert lock_fd is not None
    for directory in (dead, alive):
        _make_older(directory)
    clear_leftovers(settings.dir)
    os.close(lock_fd)

    assert not dead.exists()
    assert alive.exists()


@pytest.mark.slow
def test_the_next_jobs_agent_and_the_next_command_clear_what_a_killed_job_left(
    killed: Path, start: StartAgent, start_rank: StartRank, run_dir: Path, settings: Settings
):
    start_rank().steps(1)
    start()
    wait_for_status(run_dir)
    wait_until(lambda: not killed.exists(), what="the end of what a killed job left")

    with FakeRank(killed, run="killed") as rank:
        rank.steps(1)
    _make_older(killed)
    command = [sys.executable, "-m", "mp_agent", "doctor", "--json"]
    environment = {**os.environ, "MP_AGENT_DIR": str(settings.dir)}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    assert not killed.exists()
    assert run_dir.exists()


@pytest.mark.slow
def test_what_lies_in_a_ring_is_read_by_the_next_agent_of_the_run(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    rank = start_rank()
    rank.steps(3)
    agent = start()
    status = wait_for_status(run_dir, pid=agent.pid)
    assert scrape(status)["steps_total"] == 3
    agent.kill()
    agent.wait()
    rank.steps(4)
    rank.kill()

    status = wait_for_status(run_dir, pid=start().pid)
    values = scrape(status)
    assert values["steps_total"] == 7
    assert values["records_dropped_total{0}"] == 0
    assert values["run_active"] == 0
