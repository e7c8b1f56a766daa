"""Plays the node agent's loop for an OTLP service, with a clock that the test moves."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mp_agent.catalog.metric import Snapshot
from mp_agent.exporters.otlp.environment import read_environment
from mp_agent.exporters.otlp.service import OtlpService
from mp_agent.records.views import ExportAccount
from tests.exporters.otlp.samples import batch_of, steps
from tests.waiting import wait_until


class Loop:
    """A service that pushes `shown`; `now` is its clock, in seconds."""

    def __init__(self, directory: Path, *, span_events: bool = False) -> None:
        self.shown: Snapshot = steps(0.0)
        self._successes: dict[str, set[float]] = {}
        self.delivered = 0
        self.now = 0.0
        self.service = OtlpService(
            read_environment(os.environ), self._collect, directory, span_events=span_events
        )

    def _collect(self):
        return batch_of(self.shown, self._count)

    def _count(self) -> None:
        self.delivered += 1

    def tick(self) -> None:
        self.service.tick(self.now)

    def _ticked(self) -> bool:
        self.tick()
        return True

    def push(self, shown: Snapshot | None = None, *, after_seconds: float = 60.0) -> None:
        """Show something new, let time pass, and wait until its push has ended."""
        self.shown = self.shown if shown is None else shown
        ended = self.outcomes("otlp")
        self.now += after_seconds
        wait_until(lambda: self._ticked() and self.outcomes("otlp") != ended, seconds=30)

    def settle(self, exporter: str, outcomes: int) -> None:
        """Turn the loop until an exporter's pushes have come to so many ends."""
        wait_until(lambda: self._ticked() and sum(self.outcomes(exporter)) >= outcomes, seconds=30)

    def come_to_rest(self) -> None:
        """Wait until no push is running."""
        wait_until(lambda: all(each.idle for each in self.service._pushers.values()), seconds=30)

    def outcomes(self, exporter: str) -> tuple[int, int]:
        """Return failures and successes; of the latter the tests see one at a time."""
        account = self.account(exporter)
        successes = self._successes.setdefault(exporter, set())
        if account.last_success_unix_seconds is not None:
            successes.add(account.last_success_unix_seconds)
        return account.failures, len(successes)

    def account(self, exporter: str = "otlp") -> ExportAccount:
        (found,) = [a for a in self.service.accounts if a.exporter == exporter]
        return found

    def stop(self, seconds: float = 5.0) -> float:
        """End the service and return how long that took."""
        started = time.monotonic()
        asyncio.run(self.service.stop(started + seconds))
        return time.monotonic() - started


@contextmanager
def started(directory: Path, *, span_events: bool = False) -> Iterator[Loop]:
    loop = Loop(directory, span_events=span_events)
    loop.service.start()
    try:
        yield loop
    finally:
        loop.service.release_loggers()
