"""The node agent's loop: look at the rings, serve what they say, end when the runs are over."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mp_agent.catalog.snapshot import Snapshot
from mp_agent.catalog.thresholds import resolve
from mp_agent.errors import RingError, SettingError
from mp_agent.exporters.status_page.report import FORMAT, snapshot_report
from mp_agent.node.access import access
from mp_agent.node.discovery import Discovery
from mp_agent.node.flight import FlightRecorder
from mp_agent.node.listen import Endpoint, open_listener
from mp_agent.node.otlp import OtlpPush
from mp_agent.node.push.link import advertised
from mp_agent.node.push.transport import Transport
from mp_agent.node.run import Run
from mp_agent.node.scrapes import ScrapeLog
from mp_agent.node.server import Exposure, MetricsServer
from mp_agent.node.service import Services
from mp_agent.node.snapshot_builder import RunExport, SnapshotBuilder
from mp_agent.node.status import status_routes
from mp_agent.node.watch import RunWatch
from mp_agent.ring import locations
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

POLL_INTERVAL_SECONDS = 0.2
LISTEN_INTERVAL_SECONDS = 5.0
STOP_SECONDS = 5.0
"""How long the services may take to send what is left when the agent ends."""


class NodeAgent:
    """Watches one run, or every run of a directory, and serves their metrics on one port."""

    def __init__(self, settings: Settings, *, setting_errors: int = 0) -> None:
        self._settings = settings
        self._setting_errors = setting_errors
        self._watches: dict[Path, RunWatch] = {}
        self._base: Path | None = None
        self._parent_pid: int | None = None
        self._let_go: dict[Path, list[Path]] = {}
        """Run directories that could not be taken or removed, and the rings that they held."""
        self._scrapes = ScrapeLog()
        self._scrape_seconds: float | None = None
        self._builder = SnapshotBuilder(resolve(settings.thresholds), settings.max_series)
        self._transport = Transport(settings, self._runs, self._where)
        self._discovery = Discovery(settings, lambda: self._transport.links, self._where)
        self._server = MetricsServer(
            self._expose,
            [
                *self._transport.routes(),
                *self._discovery.routes(),
                *status_routes(self._report, self._history),
            ],
        )
        self.services = Services([self._transport, self._discovery])
        """What works beside the loop, such as pushes to the root agent."""
        self._otlp = OtlpPush(
            settings, shown=self._shown, snapshot=self._snapshot, directory=self._directory
        )
        self.services.add(self._otlp)
        self._flight = FlightRecorder(settings)
        self.services.add(self._flight)
        self._endpoint: Endpoint | None = None
        self._next_listen_seconds = 0.0
        self._stop = asyncio.Event()
        self._stop_by_seconds: float | None = None

    def watch(self, run_dir: Path, lock_fd: int) -> None:
        """Take charge of one run, whose lock is held."""
        watch = self._watches[run_dir] = RunWatch(
            run_dir,
            lock_fd,
            self._settings,
            setting_errors=self._setting_errors,
            now_seconds=time.monotonic(),
        )
        watch.run.conditions.listeners.append(self._otlp.on_condition)

    def watch_all(self, base: Path, *, with_parent: bool = False) -> None:
        """Take charge of every run that appears in `base`.

        with_parent: stop, as on SIGTERM, when the process that started this one is gone.
        """
        self._base = base
        self._parent_pid = os.getppid() if with_parent else None

    async def serve(self) -> None:
        """Work until the runs are over or a signal ends it; then clean up what is over."""
        self._handle_signals()
        self.services.start()
        try:
            while not self._stop.is_set() and not self._done(time.monotonic()):
                self._look(time.monotonic())
                await self._listen(time.monotonic())
                self.services.tick(time.monotonic())
                self._server.expect(self._transport.senders)
                self._publish(time.monotonic())
                self._follow_parent()
                await self._pause()
        finally:
            await self.services.stop(time.monotonic() + STOP_SECONDS)
            await self._server.stop()
            for watch in self._watches.values():
                if not watch.ended or not watch.remove():
                    watch.run.commit()
                    watch.release()

    def _look(self, now_seconds: float) -> None:
        """Read all rings, take on new runs, let go of those that are over."""
        if self._base is not None and self._stop_by_seconds is None:
            self._discover(self._base)
        for run_dir, watch in list(self._watches.items()):
            watch.poll(now_seconds)
            self._flight.look(watch.run, now_seconds)
            busy = self._flight.busy(watch.run, now_seconds)
            if watch.over(now_seconds) and not busy and watch.remove():
                self._flight.forget(watch.run)
                del self._watches[run_dir]
                if run_dir.exists():
                    self._let_go[run_dir] = locations.find_rings(run_dir)

    def _discover(self, base: Path) -> None:
        for run_dir in locations.find_runs(base):
            if run_dir in self._watches:
                continue
            rings = locations.find_rings(run_dir)
            if not rings or self._let_go.get(run_dir) == rings:
                continue
            try:
                lock_fd = locations.hold_agent_lock(run_dir)
            except (OSError, RingError) as error:
                log.error("run directory %s cannot be taken: %s", run_dir, error)
                self._let_go[run_dir] = rings
                continue
            if lock_fd is not None:
                log.info("watching %s", run_dir)
                self.watch(run_dir, lock_fd)

    def _done(self, now_seconds: float) -> bool:
        """Return whether there is nothing left to do."""
        if self._stop_by_seconds is not None:
            needed = any(
                watch.needed(self._scrapes, now_seconds) or self._transport.link(watch.run).owes
                for watch in self._watches.values()
            )
            return not needed or now_seconds >= self._stop_by_seconds
        return self._base is None and not self._watches

    async def _listen(self, now_seconds: float) -> None:
        """Open the port, after the first look at the rings; try again later when it is taken."""
        if self._endpoint is not None or now_seconds < self._next_listen_seconds:
            return
        scraped = "prometheus" in self._settings.exporters
        if not scraped and not self._transport.needs_door:
            return
        first_try = self._next_listen_seconds == 0.0
        self._next_listen_seconds = now_seconds + LISTEN_INTERVAL_SECONDS
        try:
            earlier = max((watch.earlier_port for watch in self._watches.values()), default=0)
            granted = access(self._settings)
            listener = open_listener(self._settings.bind, self._settings.port, earlier_port=earlier)
        except SettingError as error:
            if first_try:
                log.error("no metrics are served: %s", error)
            return
        except OSError as error:
            if first_try:
                log.error("no metrics are served until the port is free: %s", error.strerror)
            return
        port, tls = listener.getsockname()[1], granted.tls is not None
        self._endpoint = Endpoint(self._settings.bind, port, tls)
        await self._server.start(listener, granted, metrics=scraped)
        log.info("serving on %s", self._endpoint.url)

    def _publish(self, now_seconds: float) -> None:
        for watch in self._watches.values():
            final = watch.final_exported(self._scrapes, now_seconds)
            link = self._transport.link(watch.run)
            watch.publish(
                self._endpoint,
                final_exported=final,
                otlp_pending=self._otlp.owes(watch),
                pushes_total=link.pusher.taken_total,
                final_pushed=link.pusher.final_taken,
                advertise=advertised(self._settings, self._settings.bind),
            )

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), POLL_INTERVAL_SECONDS)
        except asyncio.TimeoutError:
            return

    def take_snapshot(self) -> Snapshot:
        """Return what all runs show at this moment. Called in the loop."""
        return self._snapshot(self._shown())

    def _shown(self) -> list[RunWatch]:
        return [watch for watch in self._watches.values() if watch.run.seen]

    def _runs(self) -> list[Run]:
        return [watch.run for watch in self._watches.values()]

    def _where(self) -> Endpoint | None:
        return self._endpoint

    def _directory(self) -> Path:
        """Return what this agent watches: the directory of a run, or of all runs."""
        return self._base or next(iter(self._watches), self._settings.dir)

    def _report(self) -> Mapping[str, Any]:
        """Return what the status page shows of all runs."""
        exports = self._exports(self._shown())
        return snapshot_report(exports, resolve(self._settings.thresholds), time.time())

    def _history(self, run: str) -> Mapping[str, Any] | None:
        """Return the last steps of one run, for the status page."""
        for watch in self._shown():
            if watch.run.name == run:
                return {"format": FORMAT, "run": run, **watch.run.history.columns()}
        return None

    def _snapshot(self, shown: Sequence[RunWatch]) -> Snapshot:
        exports = self._exports(shown)
        snapshot = self._builder.build(exports, time.time())
        for watch, export in zip(shown, exports, strict=True):
            watch.run.count_dropped_series(self._builder.take_dropped(export.run))
        return snapshot

    def _exports(self, shown: Sequence[RunWatch]) -> list[RunExport]:
        now_seconds, time_unix_seconds = time.monotonic(), time.time()
        exports = [
            self._transport.link(watch.run).shown(
                watch.run.export(
                    now_seconds, time_unix_seconds, scrape_duration_seconds=self._scrape_seconds
                )
            )
            for watch in shown
        ]
        return [
            replace(
                export,
                agent=replace(
                    self._flight.shown(watch.run, export.agent), exports=self._otlp.accounts
                ),
            )
            for watch, export in zip(shown, exports, strict=True)
        ]

    def _expose(self) -> Exposure:
        """Return a snapshot of all runs, and note afterwards who has got it."""
        shown = self._shown()
        snapshot = self._snapshot(shown)
        final = [watch.ended for watch in shown]

        def delivered(scraper: str, seconds: float) -> None:
            self._scrape_seconds = seconds
            self._scrapes.note(scraper, time.monotonic())
            for watch, was_final in zip(shown, final, strict=True):
                watch.note_scrape(scraper, final=was_final)
            self._publish(time.monotonic())

        return Exposure(snapshot, delivered)

    def _follow_parent(self) -> None:
        orphaned = self._parent_pid is not None and os.getppid() != self._parent_pid
        if orphaned and self._stop_by_seconds is None:
            self._terminate()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self._stop.set)

    def _terminate(self) -> None:
        """Stop: at once when this agent was started by a rank, or is told so again.

        One that runs beside the job is often told to stop together with it, and stays until the
        end was seen and scraped, at most for the linger.
        """
        if self._base is None or self._stop_by_seconds is not None:
            self._stop.set()
        else:
            self._stop_by_seconds = time.monotonic() + self._settings.linger_seconds
