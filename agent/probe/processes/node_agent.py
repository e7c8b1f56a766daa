"""Starts the node agent, and the compiler of kernels, as detached processes.

Starts the node agent from local rank 0, and restarts it when it dies.
On runs of several nodes it also starts the process that finds the root agent.
"""

import errno
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

from mp_agent.probe.processes.rendezvous import LIFE_SECONDS
from mp_agent.records.schema import RankIdentity
from mp_agent.ring import locations
from mp_agent.ring.files import beyond_standard_streams, is_still
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.run_files import Restarts, read_root_note
from mp_agent.settings import Settings
from mp_agent.settings.load import handed_over

_SHELL = "/bin/sh"
_START_SECONDS_AT_MOST = 60.0


class Starting:
    """A process that is starting. It closes its descriptor once it works, or has ended."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pipe = os.fstat(fd)
        self._deadline = time.monotonic() + _START_SECONDS_AT_MOST

    def poll(self) -> int | None:
        """Return None while the process is starting, else 0."""
        if self._fd < 0:
            return 0
        if not is_still(self._fd, self._pipe):  # the program has closed all, or is a daemon now
            self._fd = -1
            return 0
        if time.monotonic() < self._deadline:
            try:
                os.read(self._fd, 1)
            except BlockingIOError:
                return None
        os.close(self._fd)
        self._fd = -1
        return 0

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the start, at most so long."""
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.poll()


def start_detached(module: Sequence[str], environment: Mapping[str, str]) -> Starting:
    """Start `python -m MODULE … --ready-fd N` in a separate session, as no child of this process.

    It gets none of this process's descriptors, so nothing that waits for the job's processes or
    pipes ever waits for it. The shell in between is gone when this returns: no `os.wait()` meets
    it, and no handler for SIGCHLD is called. The process closes descriptor N once it works. Raises
    OSError when no process can be made, or an embedded interpreter knows no program of its own.
    """
    if not sys.executable:
        raise FileNotFoundError(errno.ENOENT, "there is no Python program to run")
    with beyond_standard_streams():
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    starting = Starting(reading)
    try:
        with _unnoticed():
            _start(
                [sys.executable, "-m", *module, "--ready-fd", str(writing)], environment, writing
            )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return starting


def _start(command: Sequence[str], environment: Mapping[str, str], ready_fd: int) -> None:
    if os.access(_SHELL, os.X_OK):
        command = [_SHELL, "-c", '"$@" &', "sh", *command]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,
        pass_fds=(ready_fd,),
    )
    if process.wait() != 0:
        raise BlockingIOError(errno.EAGAIN, "no process can be made")


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Keep the end of the child that is started here from a handler for SIGCHLD.

    The handler is called all the same if another child has ended meanwhile. Only the main thread
    can change handlers; elsewhere the handler is called once without need.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    ended_before = _some_child_has_ended()
    signals = 0

    def count(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1

    signal.signal(signal.SIGCHLD, count)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        if signals > 1 or (not ended_before and _some_child_has_ended()):
            signal.raise_signal(signal.SIGCHLD)


def _some_child_has_ended() -> bool:
    """Return whether a child has ended and is not reaped yet; it is not reaped here either."""
    with suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None
    return False


log = logging.getLogger("mp_agent")

CHECK_INTERVAL_SECONDS = 2.0


class NodeAgentLauncher:
    """Keeps one node agent running for a run on this node. Used by local rank 0 alone."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._restarts = Restarts()
        self._next_check = 0.0
        self._refused = False
        self._starter: Starting | None = None

    def ensure_running(self, *, at_once: bool = False) -> bool:
        """Start the node agent unless one runs; return whether one runs or is being started.

        Checks at most every 2 s and never waits. An agent that lingers from an earlier attempt of
        the run counts: it reads the new one too. One that dies is started again, after ever longer
        pauses if it keeps dying. at_once: check now, and start it whatever the pause.
        """
        now = time.monotonic()
        if now < self._next_check and not at_once:
            return True
        self._next_check = now + CHECK_INTERVAL_SECONDS
        if self._starting() or locations.agent_running(self._run_dir):
            self._restarts.saw_running(now)
            return True
        if not self._restarts.may_start(now, at_once=at_once):
            return False
        try:
            self._starter = start_node_agent(["--run-dir", str(self._run_dir)], self._settings)
        except Exception as error:  # a NUL byte in a setting, a module that was made unusable, …
            pass_on(error)
            if not self._refused:
                log.warning("the node agent cannot be started yet: %r", error)
            self._refused = True
            return False
        self._log_deaths()
        return True

    def _log_deaths(self) -> None:
        """Log the first death in a row, and every tenth."""
        if self._restarts.deaths % 10 == 1:
            log.warning(
                "the node agent died (%d in a row) and is started again; its log is in %s",
                self._restarts.deaths,
                self._settings.log_dir,
            )

    def _starting(self) -> bool:
        """Return whether the agent is starting, and does not hold its lock yet."""
        return self._starter is not None and self._starter.poll() is None


class RootSearch:
    """Searches the root agent for the node agent of the rank that writes `ring`.

    Once more after the first search if that found nothing: without torchrun a job has no store
    before it makes its process group, which may be long after `init()`.
    """

    def __init__(self, ring: Path, settings: Settings) -> None:
        self._ring = ring
        self._settings = settings
        self._starter: Starting | None = None
        self._over_seconds = 0.0
        """When the first search has ended; infinite after the second."""

    def begin(self) -> None:
        """Start a search. One that cannot be started is a line in the log."""
        self._over_seconds = time.monotonic() + LIFE_SECONDS
        try:
            self._starter = start_rendezvous(self._ring, self._settings)
        except OSError as error:
            pass_on(error)
            log.warning("the root node agent cannot be searched for: %s", error)

    def retry_if_due(self) -> None:
        """Search again if that is due. Called at the end of a step; never waits."""
        if self._starter is not None and self._starter.poll() is not None:
            self._starter = None
        if time.monotonic() >= self._over_seconds:
            if not self._answered():
                self.begin()
            self._over_seconds = math.inf

    def _answered(self) -> bool:
        note = read_root_note(self._ring.parent.parent)
        return note is not None and not note.problem


def searches_root(identity: RankIdentity, settings: Settings) -> bool:
    """Return whether this rank searches the root agent for the node agent of its node."""
    if identity.world_size <= identity.local_world_size or settings.node_agent == "none":
        return False
    known = bool(settings.root) and bool(settings.token.get_secret_value())
    return not known and (identity.rank == 0 or identity.local_rank == 0)


def start_node_agent(arguments: list[str], settings: Settings) -> Starting:
    """Start a detached node agent, and return how to see whether it is still starting."""
    command = ["mp_agent.node", "--detach", *arguments]
    return start_detached(command, process_environment(settings))


def start_rendezvous(ring: Path, settings: Settings) -> Starting:
    """Start the process that finds the root agent on behalf of the rank that writes `ring`."""
    command = ["mp_agent.probe.processes.rendezvous", "--ring", str(ring)]
    return start_detached(command, process_environment(settings))


def process_environment(settings: Settings) -> dict[str, str]:
    """Return the variables of a process that works with these settings."""
    environment = {**os.environ, **handed_over(settings)}
    environment.pop("MP_AGENT_ATTACH", None)
    import_path = str(Path(locations.__file__).parents[2])  # where this process found mp_agent
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (environment.get("PYTHONPATH"), import_path))
    )
    return environment


_MODULE = "mp_agent.probe.statistics.fused.build"


class KernelCompiler:
    """A process that compiles for this node's GPUs. Used by local rank 0 alone."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._starter: Starting | None = None

    def begin(self) -> None:
        """Start it where torch is built for GPUs; where it cannot be, the ranks compile."""
        if not self._settings.fused_kernels:
            return
        if torch.version.cuda is None and torch.version.hip is None:
            return
        module = [_MODULE, *(["--distribution"] if self._settings.measure_distribution else [])]
        try:
            self._starter = start_detached(module, process_environment(self._settings))
        except Exception as error:
            pass_on(error)
            log.debug("the kernels are not compiled ahead: %r", error)

    def poll(self) -> None:
        """Give back what watches the start. Called at the end of a step; never waits."""
        if self._starter is not None and self._starter.poll() is not None:
            self._starter = None
