"""Real node agents over real rings: what they serve, when they end, what they leave behind."""

import gzip
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.agent_process import get, scrape, start_agent, wait_for_status
from tests.agent.node.conftest import StartRank
from tests.agent.node.fake_rank import FakeRank
from tests.waiting import wait_until

StartAgent = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(run_dir: Path, settings: Settings) -> Iterator[StartAgent]:
    """Start an agent for the run; kill it when the test ends."""
    with ExitStack() as stack:

        def start_(*arguments: object, **changes: object) -> "subprocess.Popen[bytes]":
            changed = settings.model_copy(update=changes)
            agent = start_agent(changed, *(arguments or ("--run-dir", run_dir)))
            stack.callback(agent.wait)
            stack.callback(agent.kill)
            return agent

        yield start_


def ended(status_dir: Path) -> bool:
    status = locations.read_status(status_dir)
    return status is not None and scrape(status).get("run_active") == 0


def test_a_run_is_served_until_its_linger_is_over_and_then_leaves_nothing(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    rank = start_rank()
    rank.steps(3, loss=1.25)
    agent = start(linger_seconds=1.0)
    status = wait_for_status(run_dir)
    values = scrape(status)
    assert values["steps_total"] == 3
    assert values["loss"] == 1.25
    assert values["run_active"] == 1

    rank.end(EndReason.COMPLETED)
    wait_until(lambda: ended(run_dir), what="the end")
    assert agent.wait(10) == 0
    assert not run_dir.exists()


def test_all_formats_are_served_compressed_or_not(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    start_rank(layers=('we"ird\nläyer', "x" * 10_000)).layer_table()
    start()
    status = wait_for_status(run_dir)
    plain, headers = get(f"{status.url}/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")

    packed, headers = get(f"{status.url}/metrics", {"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert len(packed) < len(plain)
    assert b"mp_agent_run_active" in gzip.decompress(packed)

    accept = {"Accept": "application/openmetrics-text;version=1.0.0"}
    body, headers = get(f"{status.url}/metrics", accept)
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert list(text_string_to_metric_families(body.decode()))

    assert get(f"{status.url}/healthz")[0] == b"ok\n"


def test_the_status_tells_when_the_end_was_scraped(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    rank = start_rank()
    start()
    status = wait_for_status(run_dir)
    assert (status.scrapes_total, status.final_exported) == (0, False)
    scrape(status)
    wait_until(lambda: wait_for_status(run_dir).scrapes_total == 1, what="the count of it")

    rank.end(EndReason.COMPLETED)
    wait_until(lambda: ended(run_dir), what="the end")
    status = wait_until(
        lambda: (s := wait_for_status(run_dir)).final_exported and s, what="final_exported"
    )
    assert rank.running


def test_the_next_attempt_is_taken_up_by_the_agent_that_lingers(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    first = start_rank()
    first.steps(2)
    agent = start()
    status = wait_for_status(run_dir)
    first.kill()
    wait_until(lambda: ended(run_dir), what="the end of the first attempt")
    assert scrape(status)["run_end_info{killed}"] == 1

    start_rank(attempt=1, created_unix_ns=9_000).steps(3)
    wait_until(lambda: scrape(status)["run_active"] == 1, what="the second attempt")
    wait_until(lambda: scrape(status)["steps_total"] == 5, what="its steps")
    assert agent.poll() is None
    assert wait_for_status(run_dir).pid == status.pid


def test_a_second_agent_for_the_run_leaves_at_once(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    start_rank()
    first = start()
    wait_for_status(run_dir)
    second = start()

    assert second.wait(10) == 0
    assert first.poll() is None
    assert wait_for_status(run_dir).pid == first.pid


def test_an_agent_that_is_killed_is_continued_without_losing_a_step(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    rank = start_rank()
    rank.steps(5, gradients={"sum_squares": 1e6})
    first = start()
    status = wait_for_status(run_dir)
    wait_until(lambda: locations.ledger_path(run_dir).exists(), what="a ledger")
    rank.steps(5, gradients={"sum_squares": 4e6})
    wait_until(lambda: scrape(status)["steps_total"] == 10, what="ten steps")
    first.kill()
    first.wait()
    assert not locations.agent_running(run_dir)
    rank.steps(5)

    second = start()
    values = scrape(wait_for_status(run_dir, pid=second.pid))
    assert values["steps_total"] == 15
    assert values["grad_norm_exceeded_steps_total{1000}"] == 5
    assert values["step_duration_seconds_count"] == 15


def test_a_port_that_is_taken_costs_the_metrics_until_it_is_free(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    start_rank()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        agent = start(port=port)
        status = wait_for_status(run_dir)
        assert (status.port, status.url) == (0, "")
        assert agent.poll() is None
    status = wait_until(
        lambda: (s := wait_for_status(run_dir)).port and s, what="the port", seconds=20
    )
    assert status.port == port
    assert scrape(status)["run_active"] == 1


def test_a_detached_agent_is_of_its_own_session_and_holds_no_pipe(
    run_dir: Path, settings: Settings, start_rank: StartRank
):
    """Whoever waits for the end of the job's output must not wait for the agent."""
    rank = start_rank()
    starter = start_agent(
        settings.model_copy(update={"linger_seconds": 0.0}), "--detach", "--run-dir", run_dir
    )
    assert starter.wait(10) == 0
    assert locations.agent_running(run_dir), "the lock is held before the starter is gone"

    status = wait_for_status(run_dir)
    assert os.getsid(status.pid) == status.pid
    assert status.pid != starter.pid
    rank.kill()
    wait_until(lambda: not run_dir.exists(), what="the agent's end")
    (log,) = settings.log_dir.iterdir()
    assert log.name == f"{run_dir.name}.log"
    assert "ended, killed" in log.read_text()


class TestExternal:
    """One agent beside the jobs, for all runs of a directory."""

    @pytest.fixture
    def base(self, run_dir: Path) -> Path:
        return run_dir.parent

    @pytest.fixture
    def other(self, base: Path) -> Iterator[FakeRank]:
        with FakeRank(locations.run_directory(base, "bert"), run="bert") as rank:
            yield rank

    def test_runs_come_and_go_while_it_serves_them_all(
        self, start: StartAgent, start_rank: StartRank, run_dir: Path, base: Path, other: FakeRank
    ):
        rank = start_rank()
        agent = start("--dir", base, linger_seconds=0.0)
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
        wait_until(lambda: list(base.iterdir()) == [], what="the end of the other")
        agent.terminate()
        assert agent.wait(10) == 0

    def test_told_to_stop_with_its_job_it_stays_until_the_end_was_scraped(
        self, start: StartAgent, start_rank: StartRank, run_dir: Path, base: Path
    ):
        rank = start_rank()
        agent = start("--dir", base)
        status = wait_for_status(run_dir)
        scrape(status)
        agent.terminate()
        rank.kill()
        wait_until(lambda: ended(run_dir), what="the end")

        assert agent.wait(10) == 0
        assert not run_dir.exists()

    def test_told_twice_it_stops_at_once_and_leaves_the_run_to_its_successor(
        self, start: StartAgent, start_rank: StartRank, run_dir: Path, base: Path
    ):
        start_rank().steps(4)
        agent = start("--dir", base)
        scrape(wait_for_status(run_dir))
        agent.terminate()
        agent.send_signal(signal.SIGINT)
        assert agent.wait(10) == 0

        successor = start("--dir", base)
        status = wait_for_status(run_dir, pid=successor.pid)
        assert scrape(status)["steps_total"] == 4

    def test_it_does_not_outlive_a_supervisor_that_is_killed(
        self, run_dir: Path, base: Path, settings: Settings, start_rank: StartRank
    ):
        rank = start_rank()
        supervisor = os.fork()
        if supervisor == 0:
            start_agent(settings, "--dir", base, "--with-parent")
            signal.pause()
        status = wait_for_status(run_dir)
        os.kill(supervisor, signal.SIGKILL)
        os.waitpid(supervisor, 0)
        rank.kill()

        wait_until(lambda: not Path(f"/proc/{status.pid}").exists(), what="the agent's end")
        assert not run_dir.exists()

    def test_a_bad_ring_of_one_run_does_not_hide_the_others(
        self, start: StartAgent, start_rank: StartRank, run_dir: Path, base: Path
    ):
        bad = base / "broken-00000000" / "x-0" / "rank0.ring"
        bad.parent.mkdir(parents=True)
        bad.write_bytes(b"MPAGRING" + b"\xff" * 5000)
        start_rank().steps(1)
        start("--dir", base)

        assert scrape(wait_for_status(run_dir))["steps_total"] == 1


def test_on_sigterm_a_spawned_agent_leaves_at_once_and_keeps_what_its_successor_needs(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    start_rank().steps(2)
    agent = start()
    wait_for_status(run_dir)
    agent.terminate()

    assert agent.wait(10) == 0
    assert locations.find_rings(run_dir)
    assert locations.ledger_path(run_dir).exists()
