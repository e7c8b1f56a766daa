"""The node agent's loop: what runs in it, and how it ends."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from mp_agent.node.children import Postmortems, ScriptChecks
from mp_agent.node.endpoint import Endpoint
from mp_agent.node.export.push import OtlpPush, TrackerService
from mp_agent.node.export.service_discovery import ServiceDiscovery
from mp_agent.node.export.snapshots import SnapshotProvider
from mp_agent.node.flight.service import FlightService
from mp_agent.node.http.server import Exposure, MetricsServer, PortOpener
from mp_agent.node.http.status import ScrapeLog, runbook_routes
from mp_agent.node.leftovers import clear_leftovers
from mp_agent.node.registry import RunRegistry
from mp_agent.node.transport.root_address import advertised
from mp_agent.node.transport.service import PushService
from mp_agent.records.views import ExportAccount
from mp_agent.settings import Settings


class Shutdown:
    """Handles SIGTERM and SIGINT: stops at once, or after a grace period."""

    def __init__(self, linger_seconds: float) -> None:
        self.deadline_seconds: float | None = None
        """Monotonic end of the grace period; None until a stop was requested."""
        self._linger_seconds = linger_seconds
        self._lingers = False
        self._parent_pid: int | None = None
        self._stop = asyncio.Event()

    @property
    def due(self) -> bool:
        """Whether to stop now, whatever is pending."""
        late = self.deadline_seconds is not None and time.monotonic() >= self.deadline_seconds
        return late or self._stop.is_set()

    def linger_on_signal(self, *, with_parent: bool) -> None:
        """Let the first stop request start a grace period of `linger_seconds`.

        A sidecar is often stopped together with the job, and is still needed until the job's end
        was seen and scraped. with_parent: the end of the parent process is a stop request, too.
        """
        self._lingers = True
        self._parent_pid = os.getppid() if with_parent else None

    def install_signal_handlers(self) -> None:
        """Install the handlers; called in the running loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._request)
        loop.add_signal_handler(signal.SIGINT, self._stop.set)

    async def pause(self, seconds: float) -> None:
        """Sleep unless stopped; then check whether the parent process still exists."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            orphaned = self._parent_pid is not None and os.getppid() != self._parent_pid
            if orphaned and self.deadline_seconds is None:
                self._request()

    def _request(self) -> None:
        if self._lingers and self.deadline_seconds is None:
            self.deadline_seconds = time.monotonic() + self._linger_seconds
        else:
            self._stop.set()


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
        """Start every service."""
        for service in self._services:
            self._try(service, "start")

    def tick(self, now_seconds: float) -> None:
        """Call `tick` of every service."""
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


POLL_INTERVAL_SECONDS = 0.3
CLEARING_INTERVAL_SECONDS = 10.0
STOP_SECONDS = 5.0
"""Time for the services to send pending data when the agent ends."""


class NodeAgent:
    """Watches one run, or every run of a directory, and serves their metrics on one port."""

    def __init__(self, settings: Settings, *, setting_errors: int = 0) -> None:
        self._settings = settings
        flight = FlightService(settings)
        self._registry = RunRegistry(settings, flight, setting_errors=setting_errors)
        self._scrapes = ScrapeLog()
        self._push_service = PushService(settings, lambda: self._registry.runs, self._own_endpoint)
        self._snapshot_provider = SnapshotProvider(
            settings,
            self._registry,
            self._push_service,
            flight,
            self._accounts,
            lambda run: self._trackers.links(run),
            setting_errors=setting_errors,
        )
        self._otlp = OtlpPush(
            settings,
            shown=lambda: self._registry.shown,
            snapshot=self._snapshot_provider.snapshot,
            directory=lambda: self._registry.directory,
        )
        self._trackers = TrackerService(
            settings,
            shown=lambda: self._registry.shown,
            snapshot=self._snapshot_provider.snapshot,
        )
        self._registry.listeners += [self._otlp.on_condition, self._trackers.on_condition]
        discovery = ServiceDiscovery(settings, lambda: self._push_service.links, self._own_endpoint)
        checks = ScriptChecks(lambda: self._registry.runs)
        postmortems = Postmortems(settings, flight, lambda: self._registry.runs)
        self._services = Services(
            [self._push_service, discovery, self._otlp, self._trackers, flight, checks, postmortems]
        )
        self._server = MetricsServer(
            self._expose,
            [
                *self._push_service.routes(),
                *discovery.routes(),
                *self._snapshot_provider.routes(),
                *postmortems.routes(),
                *runbook_routes(settings),
            ],
            self._push_service.answer_at_once,
        )
        self._port_opener = PortOpener(settings, self._server)
        self._shutdown = Shutdown(settings.linger_seconds)
        self._is_resident = False
        """Whether it waits for jobs, which may find it before they begin."""
        self._leftovers_directory: Path | None = None
        """Directory in which killed jobs may have left files."""
        self._next_clearing_seconds = 0.0

    def watch(self, run_dir: Path, lock_fd: int) -> None:
        """Watch one run, whose lock this process holds."""
        self._leftovers_directory = run_dir.parent
        self._registry.add(run_dir, lock_fd)

    def watch_all(self, base: Path, *, with_parent: bool = False) -> None:
        """Watch every run that appears in `base`.

        with_parent: stop, as on SIGTERM, when the parent process is gone.
        """
        self._registry.base = base
        self._is_resident = not with_parent
        self._shutdown.linger_on_signal(with_parent=with_parent)

    async def serve(self) -> None:
        """Run until the runs are over or a signal stops it; then clean up."""
        self._shutdown.install_signal_handlers()
        self._services.start()
        try:
            while not self._shutdown.due and not self._done(time.monotonic()):
                await self._work_once(time.monotonic())
                await self._shutdown.pause(POLL_INTERVAL_SECONDS)
        finally:
            await self._services.stop(time.monotonic() + STOP_SECONDS)
            await self._server.stop()
            self._registry.release()
            self._clear_leftovers(time.monotonic(), at_once=True)

    async def _work_once(self, now_seconds: float) -> None:
        """Run one iteration of the loop."""
        if self._shutdown.deadline_seconds is None:
            self._registry.add_new()
        begun_seconds = time.thread_time()
        self._registry.poll(now_seconds)
        self._push_service.own_seconds += time.thread_time() - begun_seconds
        # After the first poll of the rings, so that the first scrape sees the runs.
        await self._port_opener.open(
            now_seconds,
            expects_reports=self._push_service.expects_reports,
            earlier_port=max((supervisor.earlier_port for supervisor in self._registry), default=0),
        )
        self._services.tick(time.monotonic())
        self._server.expect(self._push_service.senders)
        self._publish(time.monotonic())
        self._clear_leftovers(time.monotonic())

    def _clear_leftovers(self, now_seconds: float, *, at_once: bool = False) -> None:
        """Remove, every 10 s, files that killed jobs of this user have left."""
        if self._leftovers_directory is None or (
            now_seconds < self._next_clearing_seconds and not at_once
        ):
            return
        self._next_clearing_seconds = now_seconds + CLEARING_INTERVAL_SECONDS
        clear_leftovers(self._leftovers_directory)

    def _done(self, now_seconds: float) -> bool:
        """Return whether the agent is done."""
        if self._shutdown.deadline_seconds is None:
            return self._registry.base is None and not self._registry
        return not any(
            supervisor.needed(self._scrapes, now_seconds)
            or self._push_service.link(supervisor.run).final_report_pending
            for supervisor in self._registry
        )

    def _publish(self, now_seconds: float) -> None:
        """Write the status files: the agent's endpoint and what was exported, for the ranks."""
        if self._is_resident:
            self._registry.announce(self._port_opener.endpoint)
        for supervisor in self._registry:
            link = self._push_service.link(supervisor.run)
            supervisor.publish(
                self._port_opener.endpoint,
                final_exported=supervisor.final_exported(self._scrapes, now_seconds),
                otlp_pending=self._otlp.final_push_pending(supervisor),
                pushes_total=link.pusher.accepted_total,
                final_pushed=link.pusher.final_accepted,
                advertise=advertised(self._settings, self._settings.bind),
            )

    def _accounts(self) -> tuple[ExportAccount, ...]:
        """Return the results of all that is pushed."""
        return (*self._otlp.accounts, *self._trackers.accounts)

    def _own_endpoint(self) -> Endpoint | None:
        return self._port_opener.endpoint

    def _expose(self) -> Exposure:
        """Return a snapshot of all runs, with a callback that records its delivery."""
        shown = self._registry.shown
        resident = self._registry.base is not None
        snapshot = self._snapshot_provider.snapshot(shown, or_idle=resident)
        final = [supervisor.ended for supervisor in shown]

        def delivered(scraper: str, seconds: float) -> None:
            self._snapshot_provider.scrape_seconds = seconds
            self._scrapes.record(scraper, time.monotonic())
            for supervisor, was_final in zip(shown, final, strict=True):
                supervisor.record_scrape(scraper, final=was_final)
            self._publish(time.monotonic())

        return Exposure(snapshot, delivered)
