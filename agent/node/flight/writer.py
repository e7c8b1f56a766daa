"""Writes flight records one after the other in a thread: a disk may be slow."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mp_agent.errors import FlightError, RingError
from mp_agent.node.flight.job import FlightJob
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

_QUEUE_MAX = 8

Done = Callable[[Path | None, str], None]
"""Called with the file that was written, or with the problem."""


class FlightWriter:
    """A daemon thread that starts with the first record."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._jobs: queue.Queue[tuple[FlightJob, str, Done]] = queue.Queue(_QUEUE_MAX)
        self._results: queue.SimpleQueue[tuple[Path, bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.pending = 0
        """Submitted records whose results were not popped yet."""

    def submit(self, job: FlightJob, run: str, done: Done) -> bool:
        """Queue a job; return False if the queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="flight", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait((job, run, done))
        except queue.Full:
            return False
        self.pending += 1
        return True

    def pop_results(self) -> list[tuple[Path, bool]]:
        """Return and remove the finished jobs: run directory, and whether it was written."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        self.pending -= len(results)
        return results

    def _work(self) -> None:
        while True:
            job, run, done = self._jobs.get()
            written = self._write(job, run, done)
            self._results.put((job.run_dir, written))

    def _write(self, job: FlightJob, run: str, done: Done) -> bool:
        started = time.monotonic()
        try:
            path = job.write(self._settings)
        except (OSError, RingError, FlightError) as error:
            log.error("flight record of run %s cannot be written: %s", run, error)
            done(None, str(error))
            return False
        except Exception as error:
            log.exception("flight record of run %s cannot be written", run)
            done(None, repr(error))
            return False
        seconds = time.monotonic() - started
        log.info("run %s: flight record %s (%s, %.2f s)", run, path, job.request.reason, seconds)
        done(path, "")
        return True
