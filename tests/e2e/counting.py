"""Runs the counting job under various circumstances, and reads what it left behind."""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from mp_agent.ring.locations import AgentStatus
from tests.waiting import wait_until
from tools.jobs import Job, torchrun_job

JOB = str(Path(__file__).parent / "counting_job.py")
_JOB_SECONDS = 120.0

Samples = Mapping[tuple[str, str], float]
"""By sample name and sorted labels as JSON."""


@contextmanager
def counting_job(
    directory: Path,
    *arguments: str,
    run: str = "counting",
    torchrun: Sequence[str] = (),
    shared_memory: Path | None = None,
    wrapper: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **settings: str,
) -> Iterator[Job]:
    """Start the job; `settings` are settings of mp_agent, by name."""
    variables = {f"MP_AGENT_{name.upper()}": value for name, value in settings.items()}
    with torchrun_job(
        (*torchrun, JOB, *arguments),
        run=run,
        log_file=directory / "job.log",
        environment={**variables, **(environment or {})},
        directory=shared_memory,
        wrapper=wrapper,
    ) as job:
        yield job


def finished_digest(job: Job) -> str:
    """Wait for the end of the job, which must be a good one, and return its weights' digest."""
    assert job.process.wait(_JOB_SECONDS) == 0, job.log_tail(60)
    found = re.search(r"^digest (\w+)$", job.log_file.read_text(), re.MULTILINE)
    assert found, job.log_tail(60)
    return found[1]


def wait_half_way(job: Job, *, seconds: float = 60.0) -> None:
    """Wait until both ranks wait at the gate."""
    wait_until(
        lambda: job.log_file.read_text().count("half way") == 2 or not job.running,
        seconds=seconds,
        what="both ranks to be half way",
    )
    assert job.running, job.log_tail(60)


def wait_for_agent(job: Job, *, other_than: int = 0) -> AgentStatus:
    """Return the status of the job's node agent once it serves metrics."""
    status: AgentStatus = wait_until(
        lambda: (found := job.agent()) and found.pid != other_than and found,
        seconds=60,
        what="the node agent",
    )
    return status


def scrape(status: AgentStatus) -> Samples:
    """Return all samples that a node agent exposes."""
    with urllib.request.urlopen(f"{status.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        (sample.name, json.dumps(sample.labels, sort_keys=True)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str) -> float:
    """Return the sum of all samples called `name`."""
    return sum(value for (own, _), value in samples.items() if own == name)


@contextmanager
def mounted_tmpfs(place: Path, megabytes: int) -> Iterator[Path | None]:
    """Mount a small tmpfs and yield its path; None where this user may not mount."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    """Write until the file system of `place` is full."""
    with (place / "filling").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(os.urandom(4096))
        except OSError:
            return
