"""Runs the jobs that go wrong, and keeps the rings that they leave."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mp_agent.ring import locations
from tools.jobs import torchrun_job

JOB = Path(__file__).parent / "job.py"
_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A job that has ended: its run's directory, with its rings, and what really happened."""

    kind: str
    run_dir: Path
    facts: Mapping[str, Any]


@contextmanager
def finished_jobs(kinds: tuple[str, ...], directory: Path) -> Iterator[dict[str, Outcome]]:
    """Run jobs in one launch, without a node agent, to their ends; the last one is killed."""
    shared = directory / "shm"
    with torchrun_job(
        [str(JOB), str(directory), *kinds],
        run="unused",
        log_file=directory / "job.log",
        directory=shared,
        environment={"MP_AGENT_NODE_AGENT": "none"},
    ) as job:
        try:
            job.process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the jobs do not end:\n{job.log_tail()}") from None
        assert (directory / f"{kinds[-2]}.json").exists(), job.log_tail(60)
        yield {kind: _outcome(kind, shared, directory / f"{kind}.json") for kind in kinds}
    shutil.rmtree(shared, ignore_errors=True)


def _outcome(kind: str, shared: Path, facts: Path) -> Outcome:
    known = json.loads(facts.read_text()) if facts.exists() else {}
    return Outcome(kind, locations.run_directory(shared, kind), known)
