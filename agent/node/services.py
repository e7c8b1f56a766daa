"""Services of the node agent's loop: pushes, OTLP, service discovery, flight records."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

log = logging.getLogger("mp_agent.node")


class Service(Protocol):
    """Started and stopped by the node agent, and called in each iteration of its loop.

    All calls come from the agent's asyncio loop; none may block it.
    """

    def start(self) -> None:
        """Start; the asyncio loop is running."""

    def tick(self, now_seconds: float) -> None:
        """Do what is due. Called after every poll of the rings, several times a second."""

    async def stop(self, deadline_seconds: float) -> None:
        """Send or write pending data and stop, by `deadline_seconds` on the monotonic clock."""


class Services:
    """Several services as one; a failure is logged once and does not affect the others."""

    def __init__(self, services: Iterable[Service]) -> None:
        self._services = list(services)
        self._failures: set[tuple[Service, str]] = set()

    def start(self) -> None:
        """Start all."""
        for service in self._services:
            self._try(service, "start")

    def tick(self, now_seconds: float) -> None:
        """Call each of them."""
        for service in self._services:
            self._try(service, "tick", now_seconds)

    async def stop(self, deadline_seconds: float) -> None:
        """Stop all concurrently; what is not done by the deadline is cancelled."""
        loop = asyncio.get_running_loop()
        ends = [loop.create_task(service.stop(deadline_seconds)) for service in self._services]
        if not ends:
            return
        # Slightly more than the services' own deadline, so that cancelling is the exception.
        limit_seconds = max(deadline_seconds - loop.time(), 0.0) + 0.5
        _, late = await asyncio.wait(ends, timeout=limit_seconds)
        for task in late:
            task.cancel()
        results = await asyncio.gather(*ends, return_exceptions=True)
        for service, result in zip(self._services, results, strict=True):
            if isinstance(result, BaseException):
                log.error("%s failed to stop: %r", type(service).__name__, result)

    def _try(self, service: Service, call: str, *arguments: float) -> None:
        try:
            getattr(service, call)(*arguments)
        except Exception:
            if (service, call) not in self._failures:
                self._failures.add((service, call))
                log.exception("%s: %s failed", type(service).__name__, call)
