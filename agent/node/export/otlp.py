"""Runs the OTLP exporter as a service of the node agent."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mp_agent.catalog.snapshot import Snapshot
from mp_agent.node.supervisor import RunSupervisor
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.views import ExportAccount
from mp_agent.ring import locations
from mp_agent.settings import Settings

if TYPE_CHECKING:
    from mp_agent.exporters.otlp.service import OtlpService
    from mp_agent.exporters.otlp.signal_sources import MetricBatch

log = logging.getLogger("mp_agent.node")


class OtlpPush:
    """The OTLP exporter as a service; does nothing unless it is enabled."""

    def __init__(
        self,
        settings: Settings,
        *,
        shown: Callable[[], Sequence[RunSupervisor]],
        snapshot: Callable[[Sequence[RunSupervisor]], Snapshot],
        directory: Callable[[], Path],
    ) -> None:
        """shown: the runs that have data; directory: what the agent watches."""
        self._settings = settings
        self._shown = shown
        self._snapshot = snapshot
        self._directory = directory
        self._service: OtlpService | None = None
        self._ends: set[RunSupervisor] = set()
        """Runs that have ended."""
        self._ends_pushed: set[RunSupervisor] = set()

    @property
    def accounts(self) -> tuple[ExportAccount, ...]:
        """Results of the pushes."""
        return () if self._service is None else self._service.accounts

    def final_push_pending(self, supervisor: RunSupervisor) -> bool:
        """Return whether a run's final state was not pushed yet; true from the start."""
        pushes = self._service is not None and self._service.pushes_metrics
        return pushes and not (supervisor.ended and supervisor in self._ends_pushed)

    def on_condition(self, event: StoredConditionEvent) -> None:
        """Forward a condition event to the exporter."""
        if self._service is not None:
            self._service.on_condition(event)

    def start(self) -> None:
        """Create the exporter; log it if packages are missing, or OTEL_* disables it."""
        if "otlp" not in self._settings.exporters:
            return
        # Imported only here: an optional dependency that needs memory.
        try:
            from mp_agent.exporters.otlp.environment import read_environment
            from mp_agent.exporters.otlp.service import OtlpService
        except ImportError as error:
            log.error("nothing is pushed by OTLP: install mp-agent[otlp] (%s)", error)
            return
        environment = read_environment(os.environ)
        if not environment.transports:
            log.info("nothing is pushed by OTLP: the OTEL_* variables switch it off")
            return
        self._service = OtlpService(
            environment,
            self._metric_batch,
            self._directory(),
            span_events=self._settings.otlp_span_events,
        )
        self._service.start()

    def tick(self, now_seconds: float) -> None:
        """Push what is due; the end of a run is due at once."""
        if self._service is None:
            return
        ends = {supervisor for supervisor in self._shown() if supervisor.ended}
        if ends - self._ends:
            self._service.push_metrics_soon()
        self._ends_pushed &= ends
        self._ends = ends
        self._service.tick(now_seconds)

    async def stop(self, deadline_seconds: float) -> None:
        """Push the final state."""
        if self._service is not None:
            await self._service.stop(deadline_seconds)

    def _metric_batch(self) -> "MetricBatch":
        from mp_agent.exporters.otlp.signal_sources import MetricBatch

        shown = self._shown()
        ended = [supervisor for supervisor in shown if supervisor.ended]
        return MetricBatch(
            self._snapshot(shown),
            {supervisor.run.name: _born_unix_ns(supervisor) for supervisor in shown},
            delivered=lambda: self._ends_pushed.update(ended),
        )


def _born_unix_ns(supervisor: RunSupervisor) -> int:
    """Return the start time of a run's counters: the age of its lock file.

    The file is created before the first counter, outlives node agents as they do, and is never
    written.
    """
    try:
        return locations.agent_lock_path(supervisor.run.run_dir).stat().st_mtime_ns
    except OSError:
        return time.time_ns()
