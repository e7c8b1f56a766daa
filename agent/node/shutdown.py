"""When a node agent ends although its runs go on: on a signal, or because it was orphaned."""

import asyncio
import os
import signal
import time


class Shutdown:
    """Heeds SIGTERM and SIGINT, at once or after a respite."""

    def __init__(self, linger_seconds: float) -> None:
        self.deadline_seconds: float | None = None
        """End of the respite, on the monotonic clock; None as long as nobody asked for an end."""
        self._linger_seconds = linger_seconds
        self._lingers = False
        self._parent_pid: int | None = None
        self._stop = asyncio.Event()

    @property
    def due(self) -> bool:
        """Whether it is time to end, whatever is left to do."""
        late = self.deadline_seconds is not None and time.monotonic() >= self.deadline_seconds
        return late or self._stop.is_set()

    def linger_on_signal(self, *, with_parent: bool) -> None:
        """Stay for the linger at most when told to end for the first time.

        An agent that runs beside the job is often told to stop together with it, and is still
        needed until the job's end was seen and scraped. with_parent: take it for such a word when
        the process that started this one is gone.
        """
        self._lingers = True
        self._parent_pid = os.getppid() if with_parent else None

    def install_signal_handlers(self) -> None:
        """Begin to listen; called in the loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._request)
        loop.add_signal_handler(signal.SIGINT, self._stop.set)

    async def pause(self, seconds: float) -> None:
        """Wait, unless the end comes in between; then see whether the parent is still there."""
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
