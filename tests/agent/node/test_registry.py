"""One node agent next to the jobs, for all runs of a directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mp_agent.doctor import export, runs
from mp_agent.doctor.machine import CheckStatus, Machine
from mp_agent.node.leftovers import clear_leftovers
from mp_agent.ring import locations
from mp_agent.ring.locations import AgentStatus
from mp_agent.settings import Settings, load_settings
from mp_agent.top import local_agents, top_command
from mp_agent.version import __version__
from tests.agent.node.agent_process import StartAgent, get, scrape, starting_agents, wait_for_status
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
    wait_until(lambda: locations.find_runs(run_dir.parent) == [], what="the end of the other")
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


@pytest.mark.slow
def test_between_jobs_an_agent_is_found_and_exports_its_own_account(
    settings: Settings, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = run_dir.parent
    brief = settings.model_copy(update={"linger_seconds": 1.0})
    with starting_agents(brief, run_dir) as start:
        agent = start("--dir", base)
        status = wait_for_status(base, pid=agent.pid)
        status = wait_until(lambda: _with_port(base), what="its port")
        shown = scrape(status)
        assert shown[f"build_info{{,{__version__}}}"] == 1
        assert shown["setting_errors_total"] == 0
        assert shown["counting_seconds"] >= 0

        monkeypatch.setenv("MP_AGENT_DIR", str(base))
        monkeypatch.setenv("MP_AGENT_LOG_DIR", str(tmp_path))
        assert local_agents(load_settings()[0]) == [status.url]
        top = CliRunner().invoke(top_command, ["--once"])
        assert (top.exit_code, "waits for jobs" in top.output) == (0, True)

        machine = Machine(Settings(**{**dict(settings), "dir": base, "port": status.port}))
        for check in (runs.agents, runs.port, export.health, export.metrics):
            assert {found.verdict for found in check(machine)} == {CheckStatus.OK}, check

        with FakeRank(run_dir) as rank:
            rank.steps(3, loss=1.5)
            wait_until(lambda: "run_active" in scrape(status), what="the run")
            assert f"build_info{{,{__version__}}}" not in scrape(status)
        agent.terminate()
        agent.wait()
    assert not locations.agent_status_path(base).exists()
    assert not locations.agent_lock_path(base).exists()


@pytest.mark.slow
def test_what_a_killed_agent_said_of_itself_is_cleared(settings: Settings, run_dir: Path) -> None:
    base = run_dir.parent
    with starting_agents(settings, run_dir) as start:
        wait_for_status(base, pid=start("--dir", base).pid)
        clear_leftovers(base)
        assert locations.agent_status_path(base).exists()
    clear_leftovers(base)
    assert not locations.agent_status_path(base).exists()
    assert Machine(Settings(**{**dict(settings), "dir": base})).resident is None


def _with_port(base: Path) -> AgentStatus | None:
    status = locations.read_status(base)
    return status if status and status.port else None
