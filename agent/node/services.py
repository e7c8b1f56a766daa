"""What works beside the node agent's loop: pushes, exporters that send, written records."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

log = logging.getLogger("mp_agent.node")


class Service(Protocol):
    """Something that the node agent starts, looks after on every turn of its loop, and ends.

    All calls come from the agent's asyncio loop; none may block it.
    """

    def start(self) -> None:
        """Begin to work; the loop runs."""

    def tick(self, now_seconds: float) -> None:
        """Do what is due. Called after every look at the rings, several times a second."""

    async def stop(self, deadline_seconds: float) -> None:
        """Send or write what is left and end, by `deadline_seconds` on the monotonic clock."""


class Services:
    """Several services as one; what fails in one is logged once and hurts no other."""

    def __init__(self, services: Iterable[Service]) -> None:
        self._services = list(services)
        self._failures: set[tuple[Service, str]] = set()

    def start(self) -> None:
        """Start all."""
        for service in self._services:
            self._try(service, "start")

    def tick(self, now_seconds: float) -> None:
        """Give each its turn."""
        for service in self._services:
            self._try(service, "tick", now_seconds)

    async def stop(self, deadline_seconds: float) -> None:
        """End all at the same time; what is not done by the deadline is cut off."""
        loop = asyncio.get_running_loop()
        ends = [loop.create_task(service.stop(deadline_seconds)) for service in self._services]
        if not ends:
            return
        # A little more than the services were told, so that the cut is the exception.
        limit_seconds = max(deadline_seconds - loop.time(), 0.0) + 0.5
        _, late = await asyncio.wait(ends, timeout=limit_seconds)
        for task in late:
            task.cancel()
        results = await asyncio.gather(*ends, return_exceptions=True)
        for service, result in zip(self._services, results, strict=True):
            if isinstance(result, BaseException):
                log.error("%s did not end well: %r", type(service).__name__, result)

    def _try(self, service: Service, call: str, *arguments: float) -> None:
        try:
            getattr(service, call)(*arguments)
        except Exception:
            if (service, call) not in self._failures:
                self._failures.add((service, call))
                log.exception("%s: %s failed", type(service).__name__, call)
