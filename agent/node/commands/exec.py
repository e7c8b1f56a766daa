"""`mp-agent exec -- torchrun …` runs a job with a node agent that outlives it.

`mp-agent node` is a node agent that runs outside the job, for every run on the machine.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import click

from mp_agent.errors import RingError
from mp_agent.node.leftovers import SUPERVISED_PREFIX, clear_leftovers, hold_supervisor_lock
from mp_agent.ring import locations
from mp_agent.ring.files import make_private_directory
from mp_agent.ring.run_files import Restarts
from mp_agent.settings import Settings, load_settings

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_AGENT_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.1


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_command(command: tuple[str, ...]) -> None:
    """Run COMMAND together with a node agent, and return COMMAND's exit code.

    Signals are forwarded. The agent serves the final state for linger_seconds after the end; a
    further SIGTERM or SIGINT, once the command has ended, stops it earlier.
    """
    settings, _ = load_settings()
    sys.exit(supervise(command, settings))


def supervise(command: Sequence[str], settings: Settings) -> int:
    """Run `command` to its end, linger, and return its exit code (128 + n for signal n).

    Without shared memory the command runs all the same, unwatched.
    """
    try:
        make_private_directory(settings.dir)
        clear_leftovers(settings.dir)
        directory = Path(tempfile.mkdtemp(prefix=SUPERVISED_PREFIX, dir=settings.dir))
        # Held until this process ends: marks the directory as in use.
        hold_supervisor_lock(directory)
    except (OSError, RingError) as error:
        click.echo(f"mp-agent exec: the job runs unwatched: {error}", err=True)
        return _run(command, {"MP_AGENT_NODE_AGENT": "none"}, None, settings)
    environment = {"MP_AGENT_NODE_AGENT": "external", "MP_AGENT_DIR": str(directory)}
    try:
        return _run(command, environment, directory, settings)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path | None,
    settings: Settings,
) -> int:
    """Run the job and, if there is a directory for its rings, the node agent."""
    try:
        job = subprocess.Popen(command, env={**os.environ, **environment})
    except OSError as error:
        click.echo(f"mp-agent exec: {command[0]}: {error.strerror}", err=True)
        return 127 if isinstance(error, FileNotFoundError) else 126
    signals = _Signals(job)
    if directory is None:
        code = job.wait()
    else:
        agent = _Agent(directory)
        code = _wait(job, agent)
        if locations.find_runs(directory):
            _linger(agent, settings.linger_seconds, signals)
        agent.stop()
    return code if code >= 0 else 128 - code


def _wait(job: subprocess.Popen[bytes], agent: "_Agent") -> int:
    """Wait for the job's exit code, restarting the agent if it dies."""
    while True:
        try:
            return job.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            agent.restart_if_dead()


class _Agent:
    """The node agent, in its own session so that a terminal's Ctrl-C is the job's alone."""

    def __init__(self, directory: Path) -> None:
        program = (sys.executable, "-m", "mp_agent.node")
        self._command = (*program, "--with-parent", "--dir", str(directory))
        self._restarts = Restarts()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)

    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def killed(self) -> bool:
        return self._process.poll() is not None and self._process.returncode < 0

    def restart_if_dead(self) -> None:
        now = time.monotonic()
        if self.alive():
            self._restarts.saw_running(now)
        elif self._restarts.may_start(now):
            self._process = self._start()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_AGENT_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Signals:
    """Forwards signals to the job; after its end, a signal ends the linger period."""

    def __init__(self, job: subprocess.Popen[bytes]) -> None:
        self._job = job
        self.linger_cancelled = False
        for number in _FORWARDED:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._job.poll() is None:
            self._job.send_signal(number)
        else:
            self.linger_cancelled = True


def _linger(agent: _Agent, linger_seconds: float, signals: _Signals) -> None:
    deadline = time.monotonic() + linger_seconds
    while time.monotonic() < deadline and not signals.linger_cancelled:
        if agent.killed:
            agent.restart_if_dead()
        elif not agent.alive():
            return
        time.sleep(_POLL_SECONDS)


@click.command("node")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of shared memory to watch; the setting `dir` by default.",
)
def node_command(directory: Path | None) -> None:
    """Watch every run that appears on this machine, until a signal ends it.

    For jobs with node_agent = "external": a sidecar container, a resident unit. The settings are
    those of the environment and the settings file.
    """
    from mp_agent.node.main import end_process, watch_directory

    watch_directory(directory, detached=False)
    end_process(0)
