"""Real node agents over real rings: what they serve, when they end, what they leave behind."""

import gzip
import os
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.agent_process import (
    StartAgent,
    get,
    scrape,
    start_agent,
    wait_for_end,
    wait_for_status,
)
from tests.agent.node.conftest import StartRank
from tests.waiting import wait_until


@pytest.mark.slow
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
    wait_for_end(run_dir)
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


@pytest.mark.slow
def test_the_status_says_when_the_end_was_scraped(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    rank = start_rank()
    start()
    status = wait_for_status(run_dir)
    assert (status.scrapes_total, status.final_exported) == (0, False)
    scrape(status)
    wait_until(lambda: wait_for_status(run_dir).scrapes_total == 1, what="the count of it")

    rank.end(EndReason.COMPLETED)
    wait_for_end(run_dir)
    status = wait_until(
        lambda: (s := wait_for_status(run_dir)).final_exported and s, what="final_exported"
    )
    assert rank.running


@pytest.mark.slow
def test_the_next_attempt_is_taken_up_by_the_agent_that_lingers(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    first = start_rank()
    first.steps(2)
    agent = start()
    status = wait_for_status(run_dir)
    first.kill()
    wait_for_end(run_dir)
    assert scrape(status)["run_end_info{killed}"] == 1

    start_rank(attempt=1, created_unix_ns=9_000).steps(3)
    wait_until(lambda: scrape(status)["run_active"] == 1, what="the second attempt")
    wait_until(lambda: scrape(status)["steps_total"] == 5, what="its steps")
    assert agent.poll() is None
    assert wait_for_status(run_dir).pid == status.pid


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert values["grad_norm_exceeded_steps_total{extreme}"] == 5
    assert values["step_duration_seconds_count"] == 15


@pytest.mark.slow
def test_a_detached_agent_is_of_its_own_session_and_holds_no_pipe(
    run_dir: Path, settings: Settings, start_rank: StartRank
):
    """A process that waits for the end of the job's output must not wait for the agent."""
    rank = start_rank()
    changes = {"linger_seconds": 0.0, "alerts": {"nothing_like_it": "1"}}
    starter = start_agent(settings.model_copy(update=changes), "--detach", "--run-dir", run_dir)
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
    assert log.read_text().count("'nothing_like_it' is unknown") == 1
