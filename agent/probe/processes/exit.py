"""The end of a rank's process: at an exit, after a signal.

Which signals have reached the program, without any change of its handlers.
The interpreter itself writes the number of each signal that has a Python handler, Python's own for
SIGINT included, to the wakeup descriptor.
"""

import atexit
import contextlib
import multiprocessing
import opcode
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.files import beyond_standard_streams, is_still
from mp_agent.ring.writer import RingWriter

_POLL_SECONDS = 0.05
_LAST = -100
"""Priority among multiprocessing's finalizers: after it has joined its own children."""


class ExitHandler:
    """Calls `on_end(reason)` once at the end of the process, as late as possible.

    The main thread's outermost frame has either returned (COMPLETED) or was left by an exception.
    Of one that was reported (FAILED), and of `sys.exit`, it knows what it means; `raise SystemExit`
    hides its code, and the reason is None: the exit status has it. A process that is
    killed writes nothing: its lock is free then.
    """

    def __init__(self, on_end: Callable[[EndReason | None], None]) -> None:
        self._on_end = on_end
        self._pid = 0
        self._outermost: FrameType | None = None
        self._exit: Callable[..., NoReturn] = sys.exit
        self._noting_exit = self._exit
        self._exited: tuple[object, int] | None = None
        """Status of the last `sys.exit`, and at which instruction the outermost frame was then."""

    def install(self) -> None:
        """Install handlers for every way out of this process; in each process once."""
        if self._pid == os.getpid():
            return
        if self._pid == 0:
            atexit.register(self._at_exit)
            self._exit = sys.exit
            self._noting_exit = self._noting(sys.exit)
            sys.exit = self._noting_exit
        self._pid = os.getpid()
        self._outermost = _outermost_frame()
        if multiprocessing.parent_process() is not None:
            # A child of multiprocessing may end without the interpreter's own exit handlers.
            util.Finalize(None, self._at_process_end, exitpriority=_LAST)

    def remove(self) -> None:
        """Remove the handlers, except what other code has replaced since."""
        self._pid = 0
        self._outermost = None
        atexit.unregister(self._at_exit)
        if sys.exit is self._noting_exit:
            sys.exit = self._exit

    def _at_exit(self) -> None:
        self._finish(self._reason())

    def _at_process_end(self) -> None:
        """End a child of multiprocessing: what leaves its function is being handled right now."""
        self._finish(_reason_of(sys.exc_info()[1]))

    def _finish(self, reason: EndReason | None) -> None:
        if self._pid == os.getpid():
            self.remove()
            self._on_end(reason)

    def _reason(self) -> EndReason | None:
        outermost = self._outermost
        if outermost is None:
            return None
        if _has_returned(outermost):
            return EndReason.COMPLETED
        reported = getattr(sys, "last_traceback", None)
        if reported is not None and reported.tb_frame is outermost:
            return EndReason.FAILED
        if self._exited is not None and self._exited[1] == outermost.f_lasti:
            return _reason_of_status(self._exited[0])
        return None

    def _noting(self, original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def exit(status: object = None, /) -> NoReturn:
            """Exit the interpreter by raising SystemExit(status)."""
            outermost = self._outermost
            if outermost is not None and threading.current_thread() is threading.main_thread():
                self._exited = status, outermost.f_lasti
            original(status)

        # Pickled by name, so that another process has its own.
        exit.__module__, exit.__qualname__ = "sys", "exit"
        return exit


def _outermost_frame() -> FrameType | None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """Return whether a frame that is over was left by `return`."""
    code = frame.f_code.co_code
    return frame.f_lasti >= 0 and opcode.opname[code[frame.f_lasti]].startswith("RETURN_")


def _reason_of(error: BaseException | None) -> EndReason:
    if isinstance(error, SystemExit):
        return _reason_of_status(error.code)
    return EndReason.COMPLETED if error is None else EndReason.FAILED


def _reason_of_status(status: object) -> EndReason:
    """Return what a status given to `sys.exit` comes to; the system keeps eight bits of it."""
    good = status is None or (isinstance(status, int) and status & 0xFF == 0)
    return EndReason.COMPLETED if good else EndReason.FAILED


def wait_for_export(
    writer: RingWriter,
    run_dir: Path,
    limit_seconds: float,
    otlp_limit_seconds: float = 5.0,
    *,
    ensure_running: Callable[[], bool] | None = None,
    in_a_hurry: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until the node agent's final state was exported, at most `limit_seconds`.

    Called by local rank 0 at a normal exit, for containers that end with the job. Waits for those
    who scrape and for the root agent, if it takes what this node pushes; for an OTLP endpoint at
    most `otlp_limit_seconds`; not when there was never any of them, or when the agent is gone, or
    once `in_a_hurry()`. What a signal handler raises meanwhile ends the waiting: the program is
    over already.

    ensure_running: starts an agent in place of one that died, and returns whether there is one.
    """
    running = ensure_running or partial(locations.agent_running, run_dir)
    status = locations.read_status(run_dir)
    if status is None or not (status.scrapes_total or status.pushes_total or status.otlp_pending):
        return
    try:
        writer.wait_for_export(True)
        _wait(run_dir, limit_seconds, otlp_limit_seconds, running, in_a_hurry)
    except BaseException:
        return
    finally:
        writer.wait_for_export(False)


def _wait(
    run_dir: Path,
    limit_seconds: float,
    otlp_limit_seconds: float,
    running: Callable[[], bool],
    in_a_hurry: Callable[[], bool],
) -> None:
    deadline = time.monotonic() + limit_seconds
    otlp_deadline = time.monotonic() + otlp_limit_seconds
    while time.monotonic() < deadline and running() and not in_a_hurry():
        status = locations.read_status(run_dir)
        if status is None:
            return
        pushed = not status.otlp_pending or time.monotonic() >= otlp_deadline
        if pushed and _delivered(status):
            return
        time.sleep(_POLL_SECONDS)


def _delivered(status: locations.AgentStatus) -> bool:
    return (status.final_exported or not status.scrapes_total) and (
        status.final_pushed or not status.pushes_total
    )


_ENDING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU))
_WARNING = frozenset((signal.SIGUSR1, signal.SIGUSR2))
"""With these a scheduler announces the end; other programs use them for anything."""
_WARNING_SECONDS = 120.0
_READ_BYTES = 1 << 16
_NONE = -1

_set_wakeup_fd: Callable[..., int] = signal.set_wakeup_fd


class SignalLog:
    """Knows whether the process was asked to end. Belongs to one process; forked children to none.

    The descriptor is released to other code that sets it (asyncio), and claimed back afterwards.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._reading = self._writing = _NONE
        self._replaced: Callable[..., int] | None = None
        self._lost = True
        """Whether other code owns the wakeup descriptor."""
        self._ending = False
        self._warned_seconds: float | None = None

    def arm(self) -> None:
        """Start recording signals; only the main thread can, and only if no other code does."""
        if self._pid == os.getpid() or threading.current_thread() is not threading.main_thread():
            return
        with beyond_standard_streams():
            self._reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pipe = os.fstat(self._reading)
        self._pid, self._lost = os.getpid(), False
        if (other := self._claim()) != _NONE:
            _set_wakeup_fd(other)
            self._lost = True
        elif signal.set_wakeup_fd is _set_wakeup_fd:
            self._replaced = signal.set_wakeup_fd = self._replacement()
            os.register_at_fork(after_in_child=self._leave)

    def disarm(self) -> None:
        """Release the descriptor, and stop recording."""
        if self._pid != os.getpid():
            return
        self._pid = 0
        if signal.set_wakeup_fd is self._replaced:
            signal.set_wakeup_fd = _set_wakeup_fd
        if not self._lost:
            with contextlib.suppress(ValueError, OSError):
                _set_wakeup_fd(_NONE)
        for fd in (self._reading, self._writing):
            if is_still(fd, self._pipe):
                os.close(fd)

    def poll(self) -> None:
        """Read new signals from time to time: other ones must not fill the pipe."""
        if self._pid != os.getpid():
            return
        if not all(is_still(fd, self._pipe) for fd in (self._reading, self._writing)):
            self.disarm()
            return
        with contextlib.suppress(OSError):
            while numbers := os.read(self._reading, _READ_BYTES):
                self._ending = self._ending or not _ENDING.isdisjoint(numbers)
                if not _WARNING.isdisjoint(numbers):
                    self._warned_seconds = time.monotonic()

    @property
    def asked_to_end(self) -> bool:
        """Whether a signal has asked the process to end; True also where that cannot be known."""
        if self._pid != os.getpid() or self._lost:
            return any(_has_own_handler(number) for number in _ENDING)
        self.poll()
        warned = self._warned_seconds
        return self._ending or (warned is not None and time.monotonic() - warned < _WARNING_SECONDS)

    def _claim(self) -> int:
        """Claim the wakeup descriptor, and return the one before."""
        return _set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def _replacement(self) -> Callable[..., int]:
        def set_wakeup_fd(fd: int, *, warn_on_full_buffer: bool = True) -> int:
            """Set the fd to be written to (with the signal number) when a signal comes in."""
            if self._pid != os.getpid():
                return _set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
            if fd == _NONE:
                before = self._claim()
            else:
                before = _set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
            self._lost = fd != _NONE
            return _NONE if before == self._writing else before

        set_wakeup_fd.__module__, set_wakeup_fd.__qualname__ = "signal", "set_wakeup_fd"
        return set_wakeup_fd

    def _leave(self) -> None:
        """Release the descriptor in a forked child, whose signals are its own."""
        if self._pid != 0 and self._pid != os.getpid():
            self._pid = 0
            with contextlib.suppress(ValueError, OSError):
                if (fd := _set_wakeup_fd(_NONE)) != self._writing:
                    _set_wakeup_fd(fd)


def _has_own_handler(number: int) -> bool:
    handler = signal.getsignal(number)
    return callable(handler) and handler is not signal.default_int_handler
