"""A real torchrun job with the node agent that it starts, both gone when the `with` ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mp_agent.ring import locations
from tools.servers.running import stop

ROOT = Path(__file__).resolve().parent.parent
_SHARED_MEMORY = Path("/dev/shm")
_AGENT_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Job:
    """A torchrun job under way, and where its node agent is to be found."""

    run: str
    process: subprocess.Popen[bytes]
    directory: Path
    """What its setting `dir` says."""
    log_file: Path

    @property
    def run_dir(self) -> Path:
        """Directory in which its ranks and its node agent meet."""
        return locations.run_directory(self.directory, self.run)

    @property
    def running(self) -> bool:
        """Whether torchrun has not ended yet."""
        return self.process.poll() is None

    def agent(self) -> locations.AgentStatus | None:
        """Return what the node agent says of itself once it serves metrics, else None."""
        status = locations.read_status(self.run_dir)
        return status if status is not None and status.port else None

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines that the job printed."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def torchrun_job(
    arguments: Sequence[str],
    *,
    run: str,
    log_file: Path,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    wrapper: Sequence[str] = (),
    rendezvous: Sequence[str] = ("--standalone",),
) -> Iterator[Job]:
    """Start `torchrun ARGUMENTS` on this machine; end it and its node agent afterwards.

    environment: settings on top of this process's own. directory: shared memory to use and keep,
    else one of the job's own that is removed. wrapper: a command to start torchrun with.
    rendezvous: torchrun's options that say which nodes the job has.
    """
    place = directory or Path(tempfile.mkdtemp(prefix="mp_agent-", dir=_base()))
    command = [
        *(*wrapper, sys.executable, "-m", "torch.distributed.run", *rendezvous),
        *("--nproc-per-node", str(ranks), *arguments),
    ]
    job = _start(command, run, place, log_file, environment or {})
    try:
        yield job
    finally:
        stop(job.process, seconds=30)
        stop_agent(job)
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)


def stop_agent(job: Job) -> None:
    """End the job's node agent, if one runs, and wait until its process is gone."""
    status = locations.read_status(job.run_dir)
    if status is None or not locations.agent_running(job.run_dir):
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not is_node_agent(status.pid):
            return
        os.kill(status.pid, number)
        deadline = time.monotonic() + _AGENT_STOP_SECONDS
        while is_node_agent(status.pid) and time.monotonic() < deadline:
            time.sleep(0.02)


def is_node_agent(pid: int) -> bool:
    """Return whether the process `pid`, as this process counts them, is a node agent."""
    try:
        return b"mp_agent.node" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _base() -> Path | None:
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None


def _start(
    command: Sequence[str],
    run: str,
    directory: Path,
    log_file: Path,
    environment: Mapping[str, str],
) -> Job:
    settings = {
        "MP_AGENT_RUN": run,
        "MP_AGENT_DIR": str(directory),
        "MP_AGENT_LOG_DIR": str(log_file.parent / "agent-log"),
        "MP_AGENT_FLIGHT_DIR": str(log_file.parent / "flight"),
        "MP_AGENT_PORT": "0",
        "MP_AGENT_BIND": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **settings, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Job(run, process, directory, log_file)
