"""What is to be pushed of each signal, and what is remembered of it from push to push."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource

from mp_agent.catalog.snapshot import Snapshot
from mp_agent.exporters.otlp.clients import ExportError
from mp_agent.exporters.otlp.metrics_data import Times, batches, unix_ns
from mp_agent.exporters.otlp.start_times import StartTimes
from mp_agent.exporters.otlp.vanished import NoRecordedValues, SentSeries
from mp_agent.records.conditions import StoredConditionEvent

EVENTS_WAITING_MAX = 1000
EVENT_KEPT_SECONDS = 3600.0
"""How long an event is offered to an endpoint that does not take it."""

MakeRequests = Callable[[], Iterable[Any]]
MakeItems = Callable[[Iterable[StoredConditionEvent], Resource], Sequence[Any]]


class Source(Protocol):
    """What a lane pushes. `take` and `settle` alternate."""

    at_once: bool
    """Whether what is there is pushed at once, not at the next interval."""

    def take(self) -> MakeRequests | None:
        """Return what makes the next requests, in any thread; None when there is nothing."""

    def settle(self, error: ExportError | None) -> None:
        """Take in how the push of what was taken ended."""


@dataclass(frozen=True, slots=True)
class MetricBatch:
    """What there is to push at one moment."""

    snapshot: Snapshot
    born_unix_ns: Mapping[str, int]
    """Since when each run's counters count."""
    delivered: Callable[[], None]
    """Called once the snapshot has arrived."""


class MetricSource:
    """Snapshots, with what has vanished since the last."""

    at_once = False

    def __init__(self, harvest: Callable[[], MetricBatch], resource: Resource) -> None:
        self._harvest = harvest
        self._resource = resource
        self._process_unix_ns = time.time_ns()
        self._starts = StartTimes()
        self._sent = SentSeries()
        self._taken: MetricBatch | None = None

    def take(self) -> MakeRequests | None:
        """Harvest; see Source."""
        harvest = self._harvest()
        gone = self._sent.vanished(harvest.snapshot)
        if not gone.families and not any(family.samples for family in harvest.snapshot):
            return None
        self._taken = harvest
        return partial(self._requests, harvest, gone)

    def settle(self, error: ExportError | None) -> None:
        """Remember what the other side holds; see Source."""
        if self._taken is None:
            return
        arrived = error is None or error.arrived
        self._sent.pushed(self._taken.snapshot, delivered=arrived)
        if arrived:
            self._taken.delivered()
        self._taken = None

    def _requests(self, harvest: MetricBatch, gone: Snapshot) -> Iterator[MetricsData]:
        """Yield the snapshot in batches, then the series that are gone."""
        taken_unix_ns = unix_ns(harvest.snapshot.time_unix_seconds)
        restarts_unix_ns = self._starts.follow(harvest.snapshot, taken_unix_ns)
        times = Times(taken_unix_ns, harvest.born_unix_ns, restarts_unix_ns, self._process_unix_ns)
        yield from batches(harvest.snapshot, times, self._resource)
        for batch in batches(gone, times, self._resource):
            yield NoRecordedValues(batch.resource_metrics)


class EventSource:
    """Condition events in their order, each until it arrived, is refused for good or is old."""

    at_once = True

    def __init__(self, make_items: MakeItems, resource: Resource) -> None:
        self._make_items = make_items
        self._resource = resource
        self._waiting: deque[StoredConditionEvent] = deque(maxlen=EVENTS_WAITING_MAX)
        self._taken: tuple[StoredConditionEvent, ...] = ()

    def add(self, event: StoredConditionEvent) -> None:
        """Let an event wait for the next push; of too many the oldest is dropped."""
        self._waiting.append(event)

    def take(self) -> MakeRequests | None:
        """Take all that wait; see Source."""
        oldest_unix_seconds = time.time() - EVENT_KEPT_SECONDS
        while self._waiting and self._waiting[0].time_unix_seconds < oldest_unix_seconds:
            self._waiting.popleft()
        self._taken = tuple(self._waiting)
        if not self._taken:
            return None
        return partial(self._requests, self._taken)

    def settle(self, error: ExportError | None) -> None:
        """Forget what arrived or never will; see Source."""
        if error is None or error.for_good:
            for event in self._taken:
                if self._waiting and self._waiting[0] is event:
                    self._waiting.popleft()
        self._taken = ()

    def _requests(self, events: tuple[StoredConditionEvent, ...]) -> Iterator[Sequence[Any]]:
        yield self._make_items(events, self._resource)
