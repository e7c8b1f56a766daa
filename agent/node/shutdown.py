"""Stops a node agent before its runs are over: on a signal, or when its parent is gone."""

import asyncio
import os
import signal
import time


class Shutdown:
    """Handles SIGTERM and SIGINT: stops at once, or after a grace period."""

    def __init__(self, linger_seconds: float) -> None:
        self.deadline_seconds: float | None = None
        """Monotonic end of the grace period; None until a stop was requested."""
        self._linger_seconds = linger_seconds
        self._lingers = False
        self._parent_pid: int | None = None
        self._stop = asyncio.Event()

    @property
    def due(self) -> bool:
        """Whether to stop now, whatever is pending."""
        late = self.deadline_seconds is not None and time.monotonic() >= self.deadline_seconds
        return late or self._stop.is_set()

    def linger_on_signal(self, *, with_parent: bool) -> None:
        """Let the first stop request start a grace period of `linger_seconds`.

        A sidecar is often stopped together with the job, and is still needed until the job's end
        was seen and scraped. with_parent: the end of the parent process is a stop request, too.
        """
        self._lingers = True
        self._parent_pid = os.getppid() if with_parent else None

    def install_signal_handlers(self) -> None:
        """Install the handlers; called in the running loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._request)
        loop.add_signal_handler(signal.SIGINT, self._stop.set)

    async def pause(self, seconds: float) -> None:
        """Sleep unless stopped; then check whether the parent process still exists."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except asyncio.TimeoutError:
            orphaned = self._parent_pid is not None and os.getppid() != self._parent_pid
            if orphaned and self.deadline_seconds is None:
                self._request()

    def _request(self) -> None:
        if self._lingers and self.deadline_seconds is None:
            self.deadline_seconds = time.monotonic() + self._linger_seconds
        else:
            self._stop.set()
