"""Snapshots of all runs for scrapes and pushes, and reports for the status page."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from mp_agent.alerting.site import usable_values
from mp_agent.catalog.metric import Snapshot
from mp_agent.exporters.status_page.report import FORMAT, snapshot_report
from mp_agent.node.flight.service import FlightService
from mp_agent.node.http.status import status_routes
from mp_agent.node.registry import RunRegistry, RunSupervisor
from mp_agent.node.run.views import ServiceCounts, idle_export
from mp_agent.node.series.snapshot_builder import RunExport, SnapshotBuilder
from mp_agent.node.transport.service import PushService
from mp_agent.records.views import ExportAccount, TrackerLink
from mp_agent.settings import Settings


class SnapshotProvider:
    """Combines the views of the runs with the counts of the agent's services."""

    def __init__(
        self,
        settings: Settings,
        registry: RunRegistry,
        push_service: PushService,
        flight: FlightService,
        pushes: Callable[[], tuple[ExportAccount, ...]],
        tracker_links: Callable[[str], tuple[TrackerLink, ...]],
        *,
        setting_errors: int = 0,
    ) -> None:
        """pushes: results of the exporters' pushes. tracker_links: of a run, by its name.

        setting_errors: this agent's own.
        """
        self.scrape_seconds: float | None = None
        """Time that rendering the last scrape took."""
        self._thresholds = usable_values(settings)[0].limits
        self._builder = SnapshotBuilder(self._thresholds, settings.max_series, settings.rank_series)
        self._registry = registry
        self._push_service = push_service
        self._flight = flight
        self._pushes = pushes
        self._tracker_links = tracker_links
        self._setting_errors = setting_errors
        self._begun_unix_ns = time.time_ns()

    def snapshot(self, shown: Sequence[RunSupervisor], *, or_idle: bool = False) -> Snapshot:
        """Return the current metrics of some runs; series beyond `max_series` are counted.

        or_idle: where there is no run, those of the agent alone.
        The runs' accounts are written to disk first: a successor after a kill continues from what
        was exported or later, even where reading the same rings again would give other totals.
        """
        for supervisor in shown:
            supervisor.commit(time.monotonic())
        exports = self._exports(shown)
        idle = [] if exports or not or_idle else [self._idle_export(time.time())]
        snapshot = self._builder.build([*exports, *idle], time.time())
        for supervisor, export in zip(shown, exports, strict=True):
            supervisor.run.count_dropped_series(self._builder.pop_dropped(export.run))
        return snapshot

    def routes(self) -> list[web.RouteDef]:
        """Return the HTTP routes of the status page."""
        return status_routes(self._report, self._history)

    def _report(self) -> Mapping[str, Any]:
        return snapshot_report(self._exports(self._registry.shown), self._thresholds, time.time())

    def _history(self, run: str) -> Mapping[str, Any] | None:
        for supervisor in self._registry.shown:
            if supervisor.run.name == run:
                return {"format": FORMAT, "run": run, **supervisor.run.history.columns()}
        return None

    def _exports(self, shown: Sequence[RunSupervisor]) -> list[RunExport]:
        now_seconds, time_unix_seconds = time.monotonic(), time.time()
        return [self._export(supervisor, now_seconds, time_unix_seconds) for supervisor in shown]

    def _idle_export(self, time_unix_seconds: float) -> RunExport:
        services = ServiceCounts(
            scrape_duration_seconds=self.scrape_seconds, exports=self._pushes()
        )
        return idle_export(
            services,
            setting_errors=self._setting_errors,
            begun_unix_ns=self._begun_unix_ns,
            time_unix_seconds=time_unix_seconds,
        )

    def _export(
        self, supervisor: RunSupervisor, now_seconds: float, time_unix_seconds: float
    ) -> RunExport:
        run, link = supervisor.run, self._push_service.link(supervisor.run)
        written, failed = self._flight.counts(run)
        services = ServiceCounts(
            scrape_duration_seconds=self.scrape_seconds,
            transport=link.view,
            exports=self._pushes(),
            trackers=self._tracker_links(run.name),
            flight_records=written,
            flight_errors=failed,
        )
        return run.export(
            now_seconds, time_unix_seconds, services=services, superseded=link.superseded
        )
