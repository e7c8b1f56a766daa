"""Which signals have reached the program, without any change of its handlers.

The interpreter itself writes the number of each signal that has a Python handler, Python's own for
SIGINT included, to the wakeup descriptor.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from mp_agent.ring.files import beyond_standard_streams

_ENDING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU))
_WARNING = frozenset((signal.SIGUSR1, signal.SIGUSR2))
"""With these a scheduler announces the end; other programs use them for anything."""
_WARNING_SECONDS = 120.0
_POLL_SECONDS = 2.0
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
        self._next_poll_seconds = 0.0

    def arm(self) -> None:
        """Start recording signals; only the main thread can, and only if no other code does."""
        if self._pid == os.getpid() or threading.current_thread() is not threading.main_thread():
            return
        with beyond_standard_streams():
            self._reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
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
            with contextlib.suppress(ValueError):
                _set_wakeup_fd(_NONE)
        os.close(self._reading)
        os.close(self._writing)

    def poll(self) -> None:
        """Read new signals, at most every 2 s: other ones must not fill the pipe."""
        now_seconds = time.monotonic()
        if now_seconds >= self._next_poll_seconds:
            self._next_poll_seconds = now_seconds + _POLL_SECONDS
            self._read()

    @property
    def asked_to_end(self) -> bool:
        """Whether a signal has asked the process to end; True also where that cannot be known."""
        if self._pid != os.getpid() or self._lost:
            return any(_has_own_handler(number) for number in _ENDING)
        self._read()
        warned = self._warned_seconds
        return self._ending or (warned is not None and time.monotonic() - warned < _WARNING_SECONDS)

    def _read(self) -> None:
        if self._pid != os.getpid():
            return
        with contextlib.suppress(OSError):
            while numbers := os.read(self._reading, _READ_BYTES):
                self._ending = self._ending or not _ENDING.isdisjoint(numbers)
                if not _WARNING.isdisjoint(numbers):
                    self._warned_seconds = time.monotonic()

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
