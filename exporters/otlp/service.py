"""The OTLP exporter as a service of the node agent: what is due, and how it ends."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mp_agent.exporters.otlp.clients import ExportError, open_client
from mp_agent.exporters.otlp.environment import OtlpEnvironment, OtlpSignal
from mp_agent.exporters.otlp.events import is_sent, log_records, spans
from mp_agent.exporters.otlp.lane import SignalPusher
from mp_agent.exporters.otlp.redaction import LogCapture, Redactor
from mp_agent.exporters.otlp.resource import make_resource
from mp_agent.exporters.otlp.sources import EventSource, MetricBatch, MetricSource, Source
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.views import ExportAccount

RETRY_AFTER_SECONDS_MAX = 300.0
"""The longest that an endpoint is left alone because it asked for it."""

_NOTHING_TO_PUSH_SECONDS = 1.0
"""Until the next look for a first run, which makes a snapshot."""
_LANE_NAMES = {
    OtlpSignal.METRICS: "otlp",
    OtlpSignal.LOGS: "otlp_logs",
    OtlpSignal.TRACES: "otlp_spans",
}


class OtlpService:
    """Pushes metrics every interval, events as they come, and what is left at the end.

    All calls come from the node agent's loop; pushes are made in threads that nothing waits for.
    A child that is forked off pushes nothing.
    """

    def __init__(
        self,
        environment: OtlpEnvironment,
        harvest: Callable[[], MetricBatch],
        directory: Path,
        *,
        span_events: bool = False,
    ) -> None:
        """Prepare. harvest: called in the loop; directory: what the node agent watches."""
        self._interval_seconds = environment.interval_seconds
        self._owner_pid = os.getpid()
        self._capture = LogCapture(Redactor(os.environ))
        self._sources = _make_sources(environment, harvest, directory, span_events=span_events)
        self._lanes = {
            signal: SignalPusher(
                _LANE_NAMES[signal],
                partial(open_client, environment.transports[signal], self._capture),
                limit_seconds=environment.export_timeout_seconds,
            )
            for signal in self._sources
        }
        self._next_seconds = dict.fromkeys(self._sources, 0.0)

    @property
    def accounts(self) -> tuple[ExportAccount, ...]:
        """How the pushes of each signal went."""
        return tuple(lane.account for lane in self._lanes.values())

    @property
    def pushes_metrics(self) -> bool:
        """Whether metrics are pushed at all."""
        return OtlpSignal.METRICS in self._sources

    def on_condition(self, event: StoredConditionEvent) -> None:
        """Take a condition's coming or going; a critical one is sent at the next turn."""
        if is_sent(event):
            for source in self._sources.values():
                if isinstance(source, EventSource):
                    source.add(event)

    def urge(self) -> None:
        """Push metrics at the next turn, whatever the interval."""
        if self.pushes_metrics:
            self._next_seconds[OtlpSignal.METRICS] = 0.0

    def start(self) -> None:
        """Keep to itself what the exporters log, as long as there are pushes."""
        self._capture.install()

    def tick(self, now_seconds: float) -> None:
        """Account for pushes that ended, and begin those that are due."""
        if os.getpid() != self._owner_pid:
            return
        for signal, lane in self._lanes.items():
            if push := lane.settle():
                self._settle(signal, push.error, now_seconds)
            if lane.free and now_seconds >= self._next_seconds[signal]:
                self._begin(signal, now_seconds)

    async def stop(self, deadline_seconds: float) -> None:
        """Push what there is to say last, all signals at the same time, and end in time."""
        if os.getpid() != self._owner_pid:
            return
        await asyncio.gather(*(self._finish(signal, deadline_seconds) for signal in self._lanes))
        if all(lane.quiet for lane in self._lanes.values()):
            self.release_loggers()

    def release_loggers(self) -> None:
        """Let everybody hear again what the exporters log; a push under way may tell secrets."""
        self._capture.remove()

    def _begin(self, signal: OtlpSignal, now_seconds: float) -> None:
        source = self._sources[signal]
        if not source.at_once:
            self._next_seconds[signal] = now_seconds + _NOTHING_TO_PUSH_SECONDS
        if make_requests := source.take():
            self._next_seconds[signal] = now_seconds + self._interval_seconds
            self._lanes[signal].begin(make_requests)

    def _settle(self, signal: OtlpSignal, error: ExportError | None, now_seconds: float) -> None:
        source = self._sources[signal]
        source.settle(error)
        if error is not None:
            pause_seconds = min(error.retry_after_seconds, RETRY_AFTER_SECONDS_MAX)
            self._next_seconds[signal] = max(
                self._next_seconds[signal], now_seconds + pause_seconds
            )
        elif source.at_once:
            self._next_seconds[signal] = now_seconds

    async def _finish(self, signal: OtlpSignal, deadline_seconds: float) -> None:
        source, lane = self._sources[signal], self._lanes[signal]
        if push := lane.settle():
            source.settle(push.error)
        elif lane.busy:
            source.settle(ExportError("the end came first"))
        if last := await lane.finish(source.take(), deadline_seconds):
            source.settle(last.error)


def _make_sources(
    environment: OtlpEnvironment,
    harvest: Callable[[], MetricBatch],
    directory: Path,
    *,
    span_events: bool,
) -> dict[OtlpSignal, Source]:
    resource = make_resource(directory)
    made: dict[OtlpSignal, Source] = {OtlpSignal.METRICS: MetricSource(harvest, resource)}
    made[OtlpSignal.LOGS] = EventSource(log_records, resource)
    if span_events:
        made[OtlpSignal.TRACES] = EventSource(spans, resource)
    return {signal: source for signal, source in made.items() if signal in environment.transports}
