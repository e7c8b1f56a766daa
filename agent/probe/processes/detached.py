"""Starts detached processes: they are no children of this one, and leave no trace in it."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from mp_agent.ring.files import beyond_standard_streams

_SHELL = "/bin/sh"
_START_SECONDS_AT_MOST = 60.0


class Starting:
    """A process that is starting. It closes its descriptor once it works, or has ended."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._deadline = time.monotonic() + _START_SECONDS_AT_MOST

    def poll(self) -> int | None:
        """Return None while the process is starting, else 0."""
        if self._fd < 0:
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
    """Start `python -m MODULE … --ready-fd N` in a session of its own, as no child of this process.

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
    """Return whether a child has ended that was not waited for; it stays so."""
    with suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None
    return False
