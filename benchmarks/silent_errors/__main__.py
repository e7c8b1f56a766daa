"""Which conditions find silent errors, since which step, and whether healthy twins stay silent.

    python -m benchmarks.silent_errors [NAME ...] [--write docs/silent-errors.md]

Two ranks train under torchrun on the CPU, and a node agent watches, as `mp-agent node` does.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.machine import describe, markdown
from benchmarks.silent_errors.base import SilentError
from benchmarks.silent_errors.trainings import ERRORS
from tools.jobs import torchrun_job

JOB = ("-m", "benchmarks.silent_errors.trainings")
HEADER = ("error", "since step", "found by", "at step")
WITHIN_STEPS = 64
_SECONDS_PER_TRAINING = 60.0
_LINE = re.compile(
    r"condition=(\w+) state=firing severity=(?:warning|critical) run=(\S+) step=(\d+)"
)
_MARK = "<!-- measured -->"
Found = dict[str, list[tuple[str, int]]]
"""By run: conditions, and the step at which each was found, ascending."""


def found_in(trainings: Sequence[str], directory: Path) -> Found:
    """Run the trainings under a node agent, and return what it logged."""
    environment = {
        "MP_AGENT_NODE_AGENT": "external",
        "MP_AGENT_DIR": str(directory / "shm"),
        "MP_AGENT_LOG_DIR": str(directory),
        "MP_AGENT_FLIGHT_DIR": str(directory / "flight"),
        "MP_AGENT_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    log_file = directory / "agent.log"
    with (
        log_file.open("wb") as log,
        subprocess.Popen(
            (sys.executable, "-m", "mp_agent", "node"),
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as agent,
        torchrun_job(
            [*JOB, *trainings],
            run="unused",
            log_file=directory / "job.log",
            directory=directory / "shm",
            environment=environment,
        ) as job,
    ):
        try:
            code = job.process.wait(_SECONDS_PER_TRAINING * len(trainings))
            time.sleep(3.0)
        finally:
            agent.terminate()
    if code:
        raise SystemExit(f"the trainings failed:\n{job.log_tail(60)}")
    return _conditions(log_file.read_text())


def _conditions(log: str) -> Found:
    found: Found = {}
    for name, run, step in _LINE.findall(log):
        found.setdefault(run, []).append((name, int(step)))
    return found


def row(error: SilentError, found: Mapping[str, list[tuple[str, int]]]) -> tuple[str, ...]:
    """Return one row of the table."""
    conditions = found.get(error.name, [])
    return (
        error.text,
        str(error.onset),
        "<br>".join(f"{name.removeprefix('MpAgent')}" for name, _ in conditions) or "nothing",
        "<br>".join(str(step) for _, step in conditions),
    )


def summary(errors: Sequence[SilentError], found: Found) -> str:
    """Return how many were found in time."""
    in_time = [
        error.name
        for error in errors
        if any(step <= error.onset + WITHIN_STEPS for _, step in found.get(error.name, []))
    ]
    late = [e.name for e in errors if found.get(e.name) and e.name not in in_time]
    never = [e.name for e in errors if not found.get(e.name)]
    return (
        f"{len(in_time)} of {len(errors)} were found within {WITHIN_STEPS} steps, "
        f"{len(late)} later ({', '.join(late)}), {len(never)} not at all ({', '.join(never)})."
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.silent_errors",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="of errors; all without one")
    parser.add_argument("--write", type=Path, help="also write the table to this page")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ERRORS):
        parser.error(f"no error is named {', '.join(sorted(unknown))}; one of {', '.join(ERRORS)}")
    errors = [ERRORS[name] for name in options.names or ERRORS]
    trainings = [name for error in errors for name in (error.name, f"{error.name}/healthy")]
    with tempfile.TemporaryDirectory() as directory:
        found = found_in(trainings, Path(directory))
    false = {run: each for run, each in found.items() if run.endswith("-healthy")}
    text = f"{summary(errors, found)} On {len(false)} of {len(errors)} healthy twins a condition "
    text += f"of severity warning or critical fired{_named(false)}.\n\n"
    text += markdown(HEADER, [row(error, found) for error in errors])
    print(f"{describe(torch.device('cpu'))}\n\n{text}")
    if options.write:
        head, _, _ = options.write.read_text(encoding="utf-8").partition(_MARK)
        options.write.write_text(f"{head}{_MARK}\n\n{text}\n", encoding="utf-8")


def _named(false: Found) -> str:
    named = (f"{run}: {', '.join(name for name, _ in each)}" for run, each in false.items())
    return f" ({'; '.join(named)})" if false else ""


if __name__ == "__main__":
    main()
