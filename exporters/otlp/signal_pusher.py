"""Pushes of one signal, one at a time, each in a daemon thread of its own."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from mp_agent.exporters.otlp.transport.client import Client
from mp_agent.exporters.otlp.transport.exporter import ExportError
from mp_agent.records.views import ExportAccount

log = logging.getLogger("mp_agent.otlp")

_FINISH_POLL_SECONDS = 0.02
_GRACE_SECONDS = 1.0
_ABANDONED_THREADS_MAX = 4


class OpenClient(Protocol):
    """Makes a client, with the transport's own timeout unless another is given."""

    def __call__(self, *, timeout_seconds: float | None = None) -> Client:
        """Return a client; ExportError when none can be made."""


class Push:
    """A push in progress."""

    def __init__(
        self,
        make_requests: Callable[[], Iterable[Any]],
        get_client: Callable[[], Client],
        limit_seconds: float,
    ) -> None:
        """Start; `make_requests` and `get_client` are called in the thread."""
        self._make_requests = make_requests
        self._get_client = get_client
        self._limit_seconds = limit_seconds
        self.started_seconds = time.monotonic()
        self.error: ExportError | None = None
        # Not an executor: the interpreter joins its threads at exit.
        self._thread = threading.Thread(target=self._run, name="otlp push", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has finished, successfully or with `error`."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._get_client().send(self._make_requests(), limit_seconds=self._limit_seconds)
        except ExportError as error:
            self.error = error
        except Exception as error:
            log.exception("a push failed unexpectedly")
            self.error = ExportError(type(error).__name__)


class SignalPusher:
    """Runs the pushes of one signal, counts their outcomes, and holds the client they share.

    Everything but the pushes themselves happens in the caller's thread.
    """

    def __init__(self, name: str, open_client: OpenClient, *, limit_seconds: float) -> None:
        """name: of the exporter in the metrics; limit_seconds: for one push."""
        self._name = name
        self._open_client = open_client
        self._limit_seconds = limit_seconds
        self._client: Client | None = None
        self._push: Push | None = None
        self._abandoned: list[Push] = []
        self._failures = 0
        self._rejected = 0
        self._failing = False
        self._last_success_unix_seconds: float | None = None

    @property
    def account(self) -> ExportAccount:
        """The outcomes of the pushes so far."""
        return ExportAccount(
            exporter=self._name,
            failures=self._failures,
            rejected=self._rejected,
            last_success_unix_seconds=self._last_success_unix_seconds,
        )

    @property
    def busy(self) -> bool:
        """Whether a push is in progress."""
        return self._push is not None

    @property
    def free(self) -> bool:
        """Whether a push can start."""
        return self._push is None and len(self._running()) < _ABANDONED_THREADS_MAX

    @property
    def idle(self) -> bool:
        """Whether no thread is running."""
        return (self._push is None or self._push.done) and not self._running()

    def start(self, make_requests: Callable[[], Iterable[Any]]) -> None:
        """Start a push. Only when `free`."""
        self._push = Push(make_requests, self._get_client, self._limit_seconds)

    def settle(self) -> Push | None:
        """Return the push that has finished since the last call, and count its outcome.

        One that is stuck, because the endpoint never stops answering, is abandoned.
        """
        push = self._push
        if push is None:
            return None
        if not push.done:
            stuck_seconds = 2 * self._limit_seconds + _GRACE_SECONDS
            if time.monotonic() - push.started_seconds < stuck_seconds:
                return None
            self._abandoned.append(push)
            self._client = None
            push.error = ExportError(f"not finished after {stuck_seconds:g} s")
        self._push = None
        self._record(push.error)
        return push

    async def finish(
        self, make_requests: Callable[[], Iterable[Any]] | None, deadline_seconds: float
    ) -> Push | None:
        """Push once more, if there is data, and return by the deadline.

        A push in progress is not waited for. The last push uses a new connection: the previous
        one may be waiting for a response that comes too late.
        """
        if self._client is not None:
            self._client.close()
        remaining_seconds = deadline_seconds - time.monotonic()
        if make_requests is None or remaining_seconds <= 0:
            return None
        self._client = None
        self._open_client = partial(self._open_client, timeout_seconds=remaining_seconds)
        last = Push(make_requests, self._get_client, remaining_seconds)
        while not last.done and time.monotonic() < deadline_seconds:
            await asyncio.sleep(_FINISH_POLL_SECONDS)
        if not last.done:
            self._abandoned.append(last)
            last.error = ExportError("no response before shutdown")
        elif self._client is not None:
            self._client.close()
        self._record(last.error)
        return last

    def _running(self) -> list[Push]:
        """Return the abandoned pushes whose threads are still running."""
        self._abandoned = [push for push in self._abandoned if not push.done]
        return self._abandoned

    def _get_client(self) -> Client:
        if self._client is None:
            self._client = self._open_client()
        return self._client

    def _record(self, error: ExportError | None) -> None:
        """Count the outcome of a push; only changes are logged, since an outage may last hours."""
        if error is None or error.partial_success:
            self._last_success_unix_seconds = time.time()
        if error is None:
            if self._failing:
                log.info("%s: pushes succeed again, after %d failures", self._name, self._failures)
        else:
            self._failures += 1
            self._rejected += error.rejected
            if not self._failing and error.partial_success:
                log.warning(
                    "%s: %d items of a push were refused: %s", self._name, error.rejected, error
                )
            elif not self._failing:
                log.warning("%s: a push failed: %s", self._name, error)
        self._failing = error is not None
