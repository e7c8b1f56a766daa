"""What to push of each signal, and its pushes, one at a time."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource

from mp_agent.catalog.metric import Snapshot
from mp_agent.exporters.otlp.client import Client, ExportError
from mp_agent.exporters.otlp.events import Times, batches, unix_ns
from mp_agent.exporters.otlp.stale_series import NoRecordedValues, SentSeries, StartTimes
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.views import ExportAccount

EVENTS_WAITING_MAX = 1000
EVENT_KEPT_SECONDS = 3600.0
"""How long an event is retried at an endpoint that does not accept it."""

MakeRequests = Callable[[], Iterable[Any]]
MakeItems = Callable[[Iterable[StoredConditionEvent], Resource], Sequence[Any]]


class SignalSource(Protocol):
    """Supplies the pushes of one signal. `next_push` and `settle` alternate."""

    immediate: bool
    """Whether pushes start as soon as there is data, not at the next interval."""
    lost: int
    """Items that were given up unsent."""

    def next_push(self) -> MakeRequests | None:
        """Return what makes the next requests, in any thread; None when there are none."""

    def settle(self, error: ExportError | None) -> None:
        """Handle the result of the push last returned."""


@dataclass(frozen=True, slots=True)
class MetricBatch:
    """The metrics to push at one moment."""

    snapshot: Snapshot
    born_unix_ns: Mapping[str, int]
    """When each run's counters started."""
    delivered: Callable[[], None]
    """Called once the snapshot has arrived."""


class MetricSource:
    """Snapshots, and the end of series that are no longer in them."""

    immediate = False
    lost = 0  # the next push repeats what one did not deliver

    def __init__(self, collect: Callable[[], MetricBatch], resource: Resource) -> None:
        self._collect = collect
        self._resource = resource
        self._process_unix_ns = time.time_ns()
        self._starts = StartTimes()
        self._sent = SentSeries()
        self._in_flight: MetricBatch | None = None

    def next_push(self) -> MakeRequests | None:
        """Collect a batch; see SignalSource."""
        batch = self._collect()
        stale = self._sent.stale(batch.snapshot)
        if not stale.families and not any(family.samples for family in batch.snapshot):
            return None
        self._in_flight = batch
        return partial(self._requests, batch, stale)

    def settle(self, error: ExportError | None) -> None:
        """Remember which series the receiver holds; see SignalSource."""
        if self._in_flight is None:
            return
        delivered = error is None or error.partial_success
        self._sent.pushed(self._in_flight.snapshot, delivered=delivered)
        if delivered:
            self._in_flight.delivered()
        self._in_flight = None

    def _requests(self, batch: MetricBatch, stale: Snapshot) -> Iterator[MetricsData]:
        """Yield the snapshot in requests, then the end of stale series."""
        taken_unix_ns = unix_ns(batch.snapshot.time_unix_seconds)
        resets_unix_ns = self._starts.follow(batch.snapshot, taken_unix_ns)
        times = Times(taken_unix_ns, batch.born_unix_ns, resets_unix_ns, self._process_unix_ns)
        yield from batches(batch.snapshot, times, self._resource)
        for request in batches(stale, times, self._resource):
            yield NoRecordedValues(request.resource_metrics)


class EventSource:
    """Condition events in order, each until it is delivered, permanently refused, or too old."""

    immediate = True

    def __init__(self, make_items: MakeItems, resource: Resource) -> None:
        self.lost = 0
        self._make_items = make_items
        self._resource = resource
        self._queue: deque[StoredConditionEvent] = deque(maxlen=EVENTS_WAITING_MAX)
        self._in_flight: tuple[StoredConditionEvent, ...] = ()

    def add(self, event: StoredConditionEvent) -> None:
        """Queue an event for the next push; a full queue drops its oldest event."""
        if len(self._queue) == EVENTS_WAITING_MAX and self._queue[0] not in self._in_flight:
            self.lost += 1
        self._queue.append(event)

    def next_push(self) -> MakeRequests | None:
        """Return a push of all queued events; see SignalSource."""
        oldest_unix_seconds = time.time() - EVENT_KEPT_SECONDS
        while self._queue and self._queue[0].time_unix_seconds < oldest_unix_seconds:
            self._queue.popleft()
            self.lost += 1
        self._in_flight = tuple(self._queue)
        if not self._in_flight:
            return None
        return partial(self._requests, self._in_flight)

    def settle(self, error: ExportError | None) -> None:
        """Drop what was delivered or never will be; see SignalSource."""
        if error is None or error.permanent:
            for event in self._in_flight:
                if self._queue and self._queue[0] is event:
                    self._queue.popleft()
        else:
            waiting = set(map(id, self._queue))
            self.lost += sum(id(event) not in waiting for event in self._in_flight)
        self._in_flight = ()

    def _requests(self, events: tuple[StoredConditionEvent, ...]) -> Iterator[Sequence[Any]]:
        yield self._make_items(events, self._resource)


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
