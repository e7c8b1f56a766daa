"""Starts the pushes that are due, each by the client that the OTEL_* variables ask for."""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from mp_agent.exporters.otlp.client import Client, ExportError, OtlpExporter, OtlpResponse
from mp_agent.exporters.otlp.environment import (
    LogCapture,
    OtlpEnvironment,
    OtlpSignal,
    OtlpTransport,
    Redactor,
)
from mp_agent.exporters.otlp.events import is_sent, log_records, make_resource, spans
from mp_agent.exporters.otlp.signal_pusher import (
    EventSource,
    MetricBatch,
    MetricSource,
    SignalPusher,
    SignalSource,
)
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.views import ExportAccount

log = logging.getLogger("mp_agent.otlp")

_TERSE_LOGGERS = tuple(
    f"opentelemetry.exporter.otlp.proto.{module}"
    for module in ("grpc.exporter", "http._log_exporter")
)
"""They have filters that leave out a message like the last one, whatever signal or reason it is of:
of several signals only one would say why it fails."""


def open_client(
    transport: OtlpTransport, capture: LogCapture, *, timeout_seconds: float | None = None
) -> Client:
    """Return a client; timeout_seconds: instead of the transport's own.

    What the exporter logs about the variables, such as headers that it ignores, is logged again,
    redacted. Raises ExportError when the variables do not make an exporter.
    """
    seconds = transport.timeout_seconds if timeout_seconds is None else timeout_seconds
    signal = transport.signal.name.lower()
    capture.pop()
    try:
        exporter, response = _open_exporter(transport, seconds)
    except ExportError as error:
        raise ExportError(capture.redact(f"no exporter for {signal}: {error}")) from None
    except Exception as error:
        text = f"no exporter for {signal}: {type(error).__name__}: {error}"
        raise ExportError(capture.redact(text)) from None
    for name in _TERSE_LOGGERS:
        logging.getLogger(name).filters.clear()
    if message := capture.pop():
        log.warning("the exporter for %s reports: %s", signal, message)
    return Client(exporter, response, capture)


def _open_exporter(
    transport: OtlpTransport, timeout_seconds: float
) -> tuple[OtlpExporter, OtlpResponse]:
    # Imported only when used: gRPC takes 20 MB of memory.
    if transport.grpc:
        try:
            from mp_agent.exporters.otlp.grpc_exporters import open_grpc_exporter
        except ImportError as error:
            raise ExportError(f"{error}; pip install 'mp-agent[otlp-grpc]'") from error
        return open_grpc_exporter(transport, timeout_seconds)
    from mp_agent.exporters.otlp.http_exporters import open_http_exporter

    return open_http_exporter(transport, timeout_seconds)


RETRY_AFTER_SECONDS_MAX = 300.0
"""The longest delay that an endpoint can ask for."""

_NOTHING_TO_PUSH_SECONDS = 1.0
"""Seconds until the next check for a first run: each check makes a snapshot."""
_EXPORTER_NAMES = {
    OtlpSignal.METRICS: "otlp",
    OtlpSignal.LOGS: "otlp_logs",
    OtlpSignal.TRACES: "otlp_spans",
}


class OtlpService:
    """Pushes metrics every interval, events as they occur, and a last time at shutdown.

    All calls come from the node agent's loop; pushes run in daemon threads. A forked child pushes
    nothing.
    """

    def __init__(
        self,
        environment: OtlpEnvironment,
        collect: Callable[[], MetricBatch],
        directory: Path,
        *,
        span_events: bool = False,
    ) -> None:
        """Set up. collect: called in the loop; directory: what the node agent watches."""
        self._interval_seconds = environment.interval_seconds
        self._owner_pid = os.getpid()
        self._capture = LogCapture(Redactor(os.environ))
        self._sources = _make_sources(environment, collect, directory, span_events=span_events)
        self._pushers = {
            signal: SignalPusher(
                _EXPORTER_NAMES[signal],
                partial(open_client, environment.transports[signal], self._capture),
                limit_seconds=environment.export_timeout_seconds,
            )
            for signal in self._sources
        }
        self._next_seconds = dict.fromkeys(self._sources, 0.0)

    @property
    def accounts(self) -> tuple[ExportAccount, ...]:
        """The outcomes of the pushes of each signal."""
        return tuple(
            replace(account := pusher.account, rejected=account.rejected + source.lost)
            for pusher, source in zip(self._pushers.values(), self._sources.values(), strict=True)
        )

    @property
    def pushes_metrics(self) -> bool:
        """Whether metrics are pushed at all."""
        return OtlpSignal.METRICS in self._sources

    def on_condition(self, event: StoredConditionEvent) -> None:
        """Queue the start or end of a condition; a critical one is sent at the next tick."""
        if is_sent(event):
            for source in self._sources.values():
                if isinstance(source, EventSource):
                    source.add(event)

    def push_metrics_soon(self) -> None:
        """Push metrics at the next tick, whatever the interval."""
        if self.pushes_metrics:
            self._next_seconds[OtlpSignal.METRICS] = 0.0

    def start(self) -> None:
        """Capture what the exporters log for as long as pushes may run."""
        self._capture.install()

    def tick(self, now_seconds: float) -> None:
        """Count the outcomes of finished pushes, and start those that are due."""
        if os.getpid() != self._owner_pid:
            return
        for signal, pusher in self._pushers.items():
            if push := pusher.settle():
                self._settle(signal, push.error, now_seconds)
            if pusher.free and now_seconds >= self._next_seconds[signal]:
                self._start_push(signal, now_seconds)

    async def stop(self, deadline_seconds: float) -> None:
        """Push the last state of all signals concurrently, and return by the deadline."""
        if os.getpid() != self._owner_pid:
            return
        await asyncio.gather(*(self._finish(signal, deadline_seconds) for signal in self._pushers))
        if all(pusher.idle for pusher in self._pushers.values()):
            self.release_loggers()

    def release_loggers(self) -> None:
        """Stop capturing what the exporters log, which may hold secrets while pushes run."""
        self._capture.remove()

    def _start_push(self, signal: OtlpSignal, now_seconds: float) -> None:
        source = self._sources[signal]
        if not source.immediate:
            self._next_seconds[signal] = now_seconds + _NOTHING_TO_PUSH_SECONDS
        if make_requests := source.next_push():
            self._next_seconds[signal] = now_seconds + self._interval_seconds
            self._pushers[signal].start(make_requests)

    def _settle(self, signal: OtlpSignal, error: ExportError | None, now_seconds: float) -> None:
        source = self._sources[signal]
        source.settle(error)
        if error is not None:
            pause_seconds = min(error.retry_after_seconds, RETRY_AFTER_SECONDS_MAX)
            self._next_seconds[signal] = max(
                self._next_seconds[signal], now_seconds + pause_seconds
            )
        elif source.immediate:
            self._next_seconds[signal] = now_seconds

    async def _finish(self, signal: OtlpSignal, deadline_seconds: float) -> None:
        source, pusher = self._sources[signal], self._pushers[signal]
        if push := pusher.settle():
            source.settle(push.error)
        elif pusher.busy:
            source.settle(ExportError("shut down first"))
        if last := await pusher.finish(source.next_push(), deadline_seconds):
            source.settle(last.error)


def _make_sources(
    environment: OtlpEnvironment,
    collect: Callable[[], MetricBatch],
    directory: Path,
    *,
    span_events: bool,
) -> dict[OtlpSignal, SignalSource]:
    resource = make_resource(directory)
    sources: dict[OtlpSignal, SignalSource] = {
        OtlpSignal.METRICS: MetricSource(collect, resource),
        OtlpSignal.LOGS: EventSource(log_records, resource),
    }
    if span_events:
        sources[OtlpSignal.TRACES] = EventSource(spans, resource)
    return {
        signal: source for signal, source in sources.items() if signal in environment.transports
    }
