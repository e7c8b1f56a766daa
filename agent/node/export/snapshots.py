"""What the agent shows of its runs: to scrapers and pushes a snapshot, to the page a report."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from mp_agent.catalog.snapshot import Snapshot
from mp_agent.catalog.thresholds import resolve
from mp_agent.exporters.status_page.report import FORMAT, snapshot_report
from mp_agent.node.flight.service import FlightService
from mp_agent.node.http.status import status_routes
from mp_agent.node.registry import RunRegistry
from mp_agent.node.series.snapshot_builder import RunExport, SnapshotBuilder
from mp_agent.node.supervisor import RunSupervisor
from mp_agent.node.transport.service import PushService
from mp_agent.records.views import ExportAccount
from mp_agent.settings import Settings


class SnapshotProvider:
    """Puts together what the runs say, and what the agent's services say of themselves."""

    def __init__(
        self,
        settings: Settings,
        watches: RunRegistry,
        transport: PushService,
        flight: FlightService,
        pushes: Callable[[], tuple[ExportAccount, ...]],
    ) -> None:
        """pushes: how those of the exporters went."""
        self.scrape_seconds: float | None = None
        """How long the last scrape took to render."""
        self._thresholds = resolve(settings.thresholds)
        self._builder = SnapshotBuilder(self._thresholds, settings.max_series)
        self._watches = watches
        self._transport = transport
        self._flight = flight
        self._pushes = pushes

    def snapshot(self, shown: Sequence[RunSupervisor]) -> Snapshot:
        """Return what some runs show at this moment; what there is no room for is counted.

        The runs' accounts are on disk before: an agent that takes over after a kill goes on from
        what was shown or beyond, even where the same rings read again would add up otherwise.
        """
        for watch in shown:
            watch.commit(time.monotonic())
        exports = self._exports(shown)
        snapshot = self._builder.build(exports, time.time())
        for watch, export in zip(shown, exports, strict=True):
            watch.run.count_dropped_series(self._builder.take_dropped(export.run))
        return snapshot

    def routes(self) -> list[web.RouteDef]:
        """Return what the HTTP server is to serve to people."""
        return status_routes(self._report, self._history)

    def _report(self) -> Mapping[str, Any]:
        return snapshot_report(self._exports(self._watches.shown), self._thresholds, time.time())

    def _history(self, run: str) -> Mapping[str, Any] | None:
        for watch in self._watches.shown:
            if watch.run.name == run:
                return {"format": FORMAT, "run": run, **watch.run.history.columns()}
        return None

    def _exports(self, shown: Sequence[RunSupervisor]) -> list[RunExport]:
        now_seconds, time_unix_seconds = time.monotonic(), time.time()
        return [self._export(watch, now_seconds, time_unix_seconds) for watch in shown]

    def _export(
        self, watch: RunSupervisor, now_seconds: float, time_unix_seconds: float
    ) -> RunExport:
        run = watch.run
        export = self._transport.link(run).shown(
            run.export(now_seconds, time_unix_seconds, scrape_duration_seconds=self.scrape_seconds)
        )
        agent = self._flight.shown(run, export.agent)
        return replace(export, agent=replace(agent, exports=self._pushes()))
