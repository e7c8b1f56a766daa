"""Whatever happens to the agent, the job ends well, and with exactly the weights it has alone."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.counting import (
    counting_job,
    fill,
    finished_digest,
    mounted_tmpfs,
    scrape,
    total,
    wait_for_agent,
    wait_half_way,
)
from tests.e2e.counting_job import STEPS
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> str:
    """Digest of the weights of the job without the agent."""
    with counting_job(tmp_path_factory.mktemp("alone"), enabled="0") as job:
        return finished_digest(job)


@pytest.fixture
def tmpfs(tmp_path) -> Iterator[Path]:
    with mounted_tmpfs(tmp_path / "tmpfs", megabytes=2) as place:
        if place is None:
            pytest.skip("mounting a tmpfs needs CAP_SYS_ADMIN")
        yield place


def test_a_watched_job_has_the_same_weights_and_counts_every_step(alone, tmp_path):
    with counting_job(tmp_path) as job:
        assert finished_digest(job) == alone
        samples = scrape(wait_for_agent(job))
    assert total(samples, "mp_agent_steps_total") == STEPS
    assert total(samples, "mp_agent_probe_errors_total") == 0
    assert total(samples, "mp_agent_setting_errors_total") == 0


def test_a_killed_node_agent_is_replaced_and_its_counters_go_on(alone, tmp_path):
    with counting_job(tmp_path, "--pause", "0.05", exit_wait_seconds="5") as job:
        first = wait_for_agent(job)
        wait_until(
            lambda: total(scrape(first), "mp_agent_steps_total") > 5, seconds=60, what="steps"
        )
        os.kill(first.pid, signal.SIGKILL)
        second = wait_for_agent(job, other_than=first.pid)
        assert finished_digest(job) == alone
        samples = wait_until(
            lambda: (found := scrape(second)) and not total(found, "mp_agent_run_active") and found,
            what="the end of the run",
        )
    assert total(samples, "mp_agent_steps_total") == STEPS


def test_a_full_shared_memory_directory(alone, tmp_path, tmpfs):
    fill(tmpfs)
    with counting_job(tmp_path, shared_memory=tmpfs) as job:
        assert finished_digest(job) == alone


def test_a_shared_memory_directory_that_fills_in_the_middle(alone, tmp_path, tmpfs):
    gate = tmp_path / "gate"
    with counting_job(tmp_path, "--gate", str(gate), shared_memory=tmpfs) as job:
        wait_half_way(job)
        fill(tmpfs)
        gate.touch()
        assert finished_digest(job) == alone


def test_a_shared_memory_directory_too_small_for_the_records(alone, tmp_path, tmpfs):
    """Rings are made at init(), and grow at the first step, when there is no room left."""
    (tmpfs / "most").write_bytes(bytes(2 * 1024 * 1024 - 256 * 1024))
    with counting_job(tmp_path, shared_memory=tmpfs) as job:
        assert finished_digest(job) == alone


def test_a_shared_memory_directory_that_cannot_be_made(alone, tmp_path):
    (tmp_path / "file").touch()
    with counting_job(tmp_path, shared_memory=tmp_path / "file" / "directory") as job:
        assert finished_digest(job) == alone


def test_a_shared_memory_directory_that_is_missing_is_made(alone, tmp_path):
    with counting_job(tmp_path, shared_memory=tmp_path / "not" / "yet") as job:
        assert finished_digest(job) == alone
        assert total(scrape(wait_for_agent(job)), "mp_agent_steps_total") == STEPS


def test_a_shared_memory_directory_that_is_not_writable(alone, tmp_path):
    # Not even root may make files in /proc.
    with counting_job(tmp_path, shared_memory=Path("/proc/mp_agent")) as job:
        assert finished_digest(job) == alone


def test_a_port_that_is_taken(alone, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with counting_job(tmp_path, port=port) as job:
            assert finished_digest(job) == alone
            assert job.agent() is None


def test_the_port_variable_of_a_kubernetes_service(alone, tmp_path):
    with counting_job(tmp_path, port="tcp://10.0.0.1:9464") as job:
        assert finished_digest(job) == alone
        samples = scrape(wait_for_agent(job))
        assert "MP_AGENT_PORT has value 'tcp://10.0.0.1:9464'" in job.log_tail(100)
    assert total(samples, "mp_agent_steps_total") == STEPS
    assert total(samples, "mp_agent_setting_errors_total") > 0


def test_a_probe_whose_hooks_raise(alone, tmp_path):
    with counting_job(tmp_path, "--broken-probe") as job:
        assert finished_digest(job) == alone
        samples = scrape(wait_for_agent(job))
        assert "fault injected into the probe" in job.log_tail(200)
    assert total(samples, "mp_agent_probe_errors_total") > 0
