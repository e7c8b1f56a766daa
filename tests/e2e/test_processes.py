"""Processes next to a job's ranks, and ranks that end in odd ways; see also tests/hosts."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from mp_agent.ring import locations
from tests.e2e.counting import (
    Samples,
    counting_job,
    finished_digest,
    mounted_tmpfs,
    scrape,
    total,
    wait_for_agent,
    wait_half_way,
)
from tests.e2e.counting_job import STEPS
from tests.e2e.forking_job import STEPS_PER_EPOCH
from tests.waiting import wait_until
from tools.jobs import Job, is_node_agent, torchrun_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

FORKING_JOB = str(Path(__file__).parent / "forking_job.py")


def wait_for_end(job: Job) -> Samples:
    status = wait_for_agent(job)
    found = wait_until(
        lambda: (
            (samples := scrape(status)) and not total(samples, "mp_agent_run_active") and samples
        ),
        seconds=30,
        what="the end of the run",
    )
    assert found
    return found


def end_reason(samples: Samples) -> str:
    (labels,) = (labels for name, labels in samples if name == "mp_agent_run_end_info")
    found = re.search(r'"reason": "(\w+)"', labels)
    assert found
    return found[1]


def node_agents(job: Job) -> list[int]:
    """Return the pids of all node agents of a job's run."""
    run_dir = str(job.run_dir).encode()
    agents = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_node_agent(int(entry.name)):
            try:
                if run_dir in (entry / "cmdline").read_bytes().split(b"\0"):
                    agents.append(int(entry.name))
            except OSError:
                continue
    return agents


def test_data_workers_and_a_fork_of_the_users_own_are_no_ranks_and_inherit_nothing(tmp_path: Path):
    gate = tmp_path / "gate"
    with torchrun_job(
        (FORKING_JOB, "--gate", str(gate)), run="forking", log_file=tmp_path / "job.log"
    ) as job:
        # Spawned workers import torch again.
        wait_half_way(job, seconds=110)
        status = wait_for_agent(job)
        assert node_agents(job) == [status.pid]
        rings = {path.name for path in locations.find_rings(job.run_dir)}
        assert rings == {"rank0.ring", "rank1.ring"}
        gate.touch()
        assert job.process.wait(60) == 0, job.log_tail(60)
        samples = wait_for_end(job)
    log = job.log_file.read_text()
    assert log.count("child 7") == 2
    inherited = re.findall(r"^worker listens (\S*)$", log, re.M)
    assert len(inherited) == 2 * 2 * STEPS_PER_EPOCH
    assert all(str(status.port) not in ports.split(",") for ports in inherited)
    assert total(samples, "mp_agent_steps_total") == 2 * STEPS_PER_EPOCH
    assert total(samples, "mp_agent_probe_errors_total") == 0
    assert end_reason(samples) == "completed"


def test_two_runs_on_one_node_have_an_agent_each_and_count_for_themselves(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    shared_memory = tmp_path / "shared"
    places: dict[str, Any] = {
        "shared_memory": shared_memory,
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    with (
        counting_job(one, "--steps", "60", run="one", **places) as first,
        counting_job(other, "--steps", "90", run="other", **places) as second,
    ):
        assert finished_digest(first) != finished_digest(second)
        agents = wait_for_agent(first), wait_for_agent(second)
        ends = wait_for_end(first), wait_for_end(second)
    assert agents[0].pid != agents[1].pid
    assert agents[0].port != agents[1].port
    for samples, run, steps in zip(ends, ("one", "other"), (60, 90), strict=True):
        assert total(samples, "mp_agent_steps_total") == steps
        runs = {
            found[1] for _, labels in samples if (found := re.search(r'"run": "(\w+)"', labels))
        }
        assert runs == {run}


def test_shared_memory_of_two_megabytes(tmp_path: Path):
    """Rings of a small model still fit; for what happens when they do not see test_unharmed.py."""
    with counting_job(tmp_path, enabled="0") as job:
        alone = finished_digest(job)
    with mounted_tmpfs(tmp_path / "tmpfs", megabytes=2) as place:
        if place is None:
            pytest.skip("mounting a tmpfs needs CAP_SYS_ADMIN")
        with counting_job(tmp_path, shared_memory=place) as job:
            assert finished_digest(job) == alone
            samples = wait_for_end(job)
    assert total(samples, "mp_agent_steps_total") == STEPS
    assert total(samples, "mp_agent_coverage_ratio") == 1
    assert total(samples, "mp_agent_records_dropped_total") == 0
    assert end_reason(samples) == "completed"


def test_a_rank_that_exits_in_the_middle_of_a_step(tmp_path: Path):
    with counting_job(tmp_path, "--leave-at", "20") as job:
        assert job.process.wait(60) != 0
        assert "exitcode  : 3" in job.log_file.read_text()
        samples = wait_for_end(job)
    assert end_reason(samples) == "failed"
    # The step under way was measured, and counts.
    assert total(samples, "mp_agent_steps_total") == 20


def test_a_job_of_one_step_is_there_to_be_scraped_when_it_is_over(tmp_path: Path):
    with counting_job(tmp_path, "--steps", "1") as job:
        finished_digest(job)
        samples = wait_for_end(job)
    assert total(samples, "mp_agent_steps_total") == 1
    assert end_reason(samples) == "completed"


def test_a_node_agent_that_hangs_delays_the_end_by_no_more_than_the_wait(tmp_path: Path):
    gate = tmp_path / "gate"
    with counting_job(tmp_path, "--gate", str(gate), exit_wait_seconds="2") as job:
        wait_half_way(job)
        agent = wait_for_agent(job)
        scrape(agent)
        wait_until(lambda: wait_for_agent(job).scrapes_total, what="the note of a scrape")
        os.kill(agent.pid, signal.SIGSTOP)
        try:
            gate.touch()
            finished_digest(job)
        finally:
            os.kill(agent.pid, signal.SIGCONT)
        samples = wait_for_end(job)
    assert total(samples, "mp_agent_steps_total") == STEPS
    assert end_reason(samples) == "completed"
