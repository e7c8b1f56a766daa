"""Ends and new beginnings of real jobs: restarts, and a namespace that takes the agent with it."""

import os
import shutil
import subprocess

import pytest

from tests.e2e.counting import (
    counting_job,
    finished_digest,
    scrape,
    total,
    wait_for_agent,
    wait_half_way,
)
from tests.e2e.counting_job import STEPS
from tests.waiting import wait_until
from tools.servers.running import alertmanager, prometheus

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


def test_an_attempt_that_torchrun_restarts_goes_on_under_the_same_agent(tmp_path):
    # With the store of the launcher, gloo finds the addresses of the first attempt in it.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with counting_job(
        tmp_path, "--fail-once", torchrun=("--max-restarts", "1"), environment=environment
    ) as job:
        first = wait_for_agent(job)
        finished_digest(job)
        last = wait_for_agent(job)
        samples = wait_until(
            lambda: (found := scrape(last)) and not total(found, "mp_agent_run_active") and found,
            what="the end of the run",
        )
    assert last.pid == first.pid
    assert total(samples, "mp_agent_steps_total") == STEPS // 2 + STEPS
    names = {name: labels for name, labels in samples}
    assert '"attempt": "1"' in names["mp_agent_run_info"]
    assert '"reason": "completed"' in names["mp_agent_run_end_info"]


def namespace_command() -> tuple[str, ...]:
    """Return the command that starts another as the first process of a new PID namespace."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    command = ("unshare", *user, "--pid", "--fork", "--mount-proc")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], capture_output=True).returncode
    ):
        pytest.skip("a new PID namespace needs CAP_SYS_ADMIN or user namespaces")
    return command


def test_the_end_of_a_job_is_scraped_before_its_pid_namespace_is_gone(server, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("groups: []\n")
    configuration = "route: {receiver: none}\nreceivers: [{name: none}]\n"
    gate = tmp_path / "gate"
    with (
        alertmanager(server("alertmanager"), tmp_path / "am", configuration) as url,
        prometheus(
            server("prometheus"), tmp_path / "prometheus", rules=rules, alertmanager_url=url
        ) as running,
        counting_job(tmp_path, "--gate", str(gate), wrapper=namespace_command()) as job,
    ):
        running.scrape([wait_for_agent(job).url.removeprefix("http://")])
        wait_half_way(job)
        wait_until(
            lambda: len(running.query("mp_agent_run_active == 1")) == 1, seconds=30, what="a scrape"
        )
        gate.touch()
        finished_digest(job)
        ended = 'last_over_time(mp_agent_run_end_info{reason="completed"}[5m])'
        steps = "last_over_time(mp_agent_steps_total[5m])"
        assert len(running.query(ended)) == 1
        assert [float(found["value"][1]) for found in running.query(steps)] == [STEPS]
        assert not running.query("mp_agent_run_active == 1")
