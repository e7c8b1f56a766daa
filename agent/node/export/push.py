"""Pushes to OTLP receivers and experiment trackers."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mp_agent.catalog.metric import Snapshot
from mp_agent.exporters.trackers.client import (
    PREFIX,
    Entry,
    TrackedRun,
    TrackerSender,
    open_client,
    values_by_run,
    values_of_event,
)
from mp_agent.node.registry import RunSupervisor
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.views import ExportAccount, TrackerLink
from mp_agent.ring import locations
from mp_agent.settings import Settings

if TYPE_CHECKING:
    from mp_agent.exporters.otlp.service import OtlpService
    from mp_agent.exporters.otlp.signal_pusher import MetricBatch


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
        from mp_agent.exporters.otlp.signal_pusher import MetricBatch

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


INTERVAL_SECONDS = 10.0
_FINISH_POLL_SECONDS = 0.05
_STEP = f"{PREFIX}step"


class TrackerService:
    """The setting `trackers` as a service; does nothing unless there are any.

    Every 10 s each tracker gets the metrics of each run whose step has changed, and conditions as
    they come. Only the root agent has metrics of a run as a whole, so only it sends them.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        shown: Callable[[], Sequence[RunSupervisor]],
        snapshot: Callable[[Sequence[RunSupervisor]], Snapshot],
    ) -> None:
        """shown: the runs that have data."""
        self._settings = settings
        self._shown = shown
        self._snapshot = snapshot
        self._senders: dict[tuple[str, str], TrackerSender] = {}
        self._retired: list[TrackerSender] = []
        """Senders of runs that are over."""
        self._last_step: dict[str, float] = {}
        self._next_seconds = 0.0

    @property
    def accounts(self) -> tuple[ExportAccount, ...]:
        """What was sent and lost, per tracker, of all runs."""
        senders = [*self._senders.values(), *self._retired]
        return tuple(
            _sum_of(tracker, [one.account for one in senders if one.tracker == tracker])
            for tracker in self._settings.trackers
        )

    def links(self, run: str) -> tuple[TrackerLink, ...]:
        """Return where the trackers show a run, of those in which it is open."""
        senders = (self._senders.get((tracker, run)) for tracker in self._settings.trackers)
        return tuple(sender.link for sender in senders if sender and sender.link)

    def start(self) -> None:
        """Do nothing: each tracker is opened in its own thread, with what it is first sent."""

    def on_condition(self, event: StoredConditionEvent) -> None:
        """Send the start or end of a condition."""
        self._send(
            event.condition.run, Entry(values_of_event(event), event.step, event.time_unix_seconds)
        )

    def tick(self, now_seconds: float) -> None:
        """Send what is due."""
        if self._settings.trackers and now_seconds >= self._next_seconds:
            self._next_seconds = now_seconds + INTERVAL_SECONDS
            self._send_metrics()
            self._retire({supervisor.run.name for supervisor in self._shown()})

    async def stop(self, deadline_seconds: float) -> None:
        """Send the last state, and let the trackers finish until the deadline."""
        if self._settings.trackers:
            self._send_metrics()
        self._retire(())
        while late := [sender.tracker for sender in self._retired if not sender.closed]:
            if time.monotonic() >= deadline_seconds:
                break
            await asyncio.sleep(_FINISH_POLL_SECONDS)
        else:
            return
        log.warning("not finished in time: %s", ", ".join(late))

    def _send_metrics(self) -> None:
        snapshot = self._snapshot(self._shown())
        for run, values in values_by_run(snapshot).items():
            step = values.get(_STEP)
            if step is not None and self._last_step.get(run) != step:
                self._last_step[run] = step
                self._send(run, Entry(values, int(step), snapshot.time_unix_seconds))

    def _retire(self, shown: Collection[str]) -> None:
        """Close what was sent to for runs that are over."""
        for key in [key for key in self._senders if key[1] not in shown]:
            self._retired.append(self._senders.pop(key))
            self._retired[-1].close()
            self._last_step.pop(key[1], None)

    def _send(self, run: str, entry: Entry) -> None:
        for tracker in self._settings.trackers:
            key = (tracker, run)
            if key not in self._senders:
                tracked = TrackedRun(run, self._settings.log_dir)
                self._senders[key] = TrackerSender(tracker, tracked, partial(open_client, tracker))
            self._senders[key].send(entry)


def _sum_of(tracker: str, accounts: Sequence[ExportAccount]) -> ExportAccount:
    successes = [account.last_success_unix_seconds or 0.0 for account in accounts]
    return ExportAccount(
        exporter=tracker,
        failures=sum(account.failures for account in accounts),
        rejected=sum(account.rejected for account in accounts),
        last_success_unix_seconds=max(successes, default=0.0) or None,
    )
