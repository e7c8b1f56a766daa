"""What to push of each signal, and the state kept between its pushes."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource

from mp_agent.catalog.snapshot import Snapshot
from mp_agent.exporters.otlp.conversion.metrics_data import Times, batches, unix_ns
from mp_agent.exporters.otlp.conversion.stale_series import NoRecordedValues, SentSeries
from mp_agent.exporters.otlp.conversion.start_times import StartTimes
from mp_agent.exporters.otlp.transport.exporter import ExportError
from mp_agent.records.conditions import StoredConditionEvent

EVENTS_WAITING_MAX = 1000
EVENT_KEPT_SECONDS = 3600.0
"""How long an event is retried at an endpoint that does not accept it."""

MakeRequests = Callable[[], Iterable[Any]]
MakeItems = Callable[[Iterable[StoredConditionEvent], Resource], Sequence[Any]]


class SignalSource(Protocol):
    """Supplies the pushes of one signal. `next_push` and `settle` alternate."""

    immediate: bool
    """Whether pushes start as soon as there is data, not at the next interval."""

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
        self._make_items = make_items
        self._resource = resource
        self._queue: deque[StoredConditionEvent] = deque(maxlen=EVENTS_WAITING_MAX)
        self._in_flight: tuple[StoredConditionEvent, ...] = ()

    def add(self, event: StoredConditionEvent) -> None:
        """Queue an event for the next push; a full queue drops its oldest event."""
        self._queue.append(event)

    def next_push(self) -> MakeRequests | None:
        """Return a push of all queued events; see SignalSource."""
        oldest_unix_seconds = time.time() - EVENT_KEPT_SECONDS
        while self._queue and self._queue[0].time_unix_seconds < oldest_unix_seconds:
            self._queue.popleft()
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
        self._in_flight = ()

    def _requests(self, events: tuple[StoredConditionEvent, ...]) -> Iterator[Sequence[Any]]:
        yield self._make_items(events, self._resource)
