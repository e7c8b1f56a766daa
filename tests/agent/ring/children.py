"""Forked children: a lock, a death or a fork is only seen by another process."""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """Fork a child that does `work`; yield its pid; kill it at the end, if it still runs."""
    pid = _fork(work)
    try:
        yield pid
    finally:
        kill(pid)


def kill(pid: int) -> None:
    """SIGKILL a child and wait until it is gone; nothing when it was waited for before."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ChildProcessError, ProcessLookupError):
        pass


def exit_code_of(work: Callable[[], object]) -> int:
    """Return how a child that does `work` ended: 0, 1 for an exception, -n for signal n."""
    _, status = os.waitpid(_fork(work), 0)
    return os.waitstatus_to_exitcode(status)


def _fork(work: Callable[[], object]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    gc.freeze()  # what other libraries left for the collector may not survive a fork
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
