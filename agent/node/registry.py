"""The runs of this node, each with its lock, its ledger, its status file and its end."""

import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from mp_agent.errors import FailureLog, RingError
from mp_agent.node.conditions.messages import Listener
from mp_agent.node.endpoint import Endpoint
from mp_agent.node.flight.service import FlightService
from mp_agent.node.http.status import ScrapeLog
from mp_agent.node.leftovers import remove_empty, remove_files, unlink
from mp_agent.node.run.run import Run
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.files import make_private_directory
from mp_agent.ring.run_files import read_root_note, root_note_path
from mp_agent.settings import Settings, default_directory

log = logging.getLogger("mp_agent.node")

COMMIT_INTERVAL_SECONDS = 1.0
_COMMIT_SHARE = 0.01
"""Of a core, for commits: the ledger of a run with 100 000 ranks takes long to write. What is lost
with an agent that is killed is read again, from the rings and from other nodes."""
STOPPED_SECONDS = 5.0
"""An agent that has not polled for so long was stopped, and got no reports of other nodes."""
FIRST_RING_SECONDS = 60.0
"""Time to wait for the first ring of a run."""


class RunSupervisor:
    """Supervises a run from its first ring to the end of the linger period."""

    def __init__(
        self,
        run_dir: Path,
        lock_fd: int,
        settings: Settings,
        *,
        setting_errors: int,
        now_seconds: float,
    ) -> None:
        """Supervise a run whose lock this process holds as `lock_fd`."""
        self.run = Run(run_dir, settings, setting_errors=setting_errors)
        self._lock_fd = lock_fd
        self._linger_seconds = settings.linger_seconds
        self._started_seconds = now_seconds
        self._polled_seconds = now_seconds
        self._was_stopped = False
        self._started_unix_ns = time.time_ns()
        self._commit_due_seconds = now_seconds + COMMIT_INTERVAL_SECONDS
        self._ended_since_seconds: float | None = None
        self._session = self.run.session
        earlier = locations.read_status(run_dir)
        self._scrapes_total = earlier.scrapes_total if earlier else 0
        self._pushes_before = earlier.pushes_total if earlier else 0
        self.earlier_port = earlier.port if earlier else 0
        """Port of the previous node agent; 0 if there was none."""
        self._final_seen = False
        self._final_seen_by: set[str] = set()
        self._published: locations.AgentStatus | None = None
        self._failures = FailureLog()
        self._unwritten: set[str] = set()
        """Why the status file could not be written."""

    @property
    def ended(self) -> bool:
        """Whether all local ranks have ended."""
        return self._ended_since_seconds is not None

    def poll(self, now_seconds: float) -> None:
        """Update the account. A failure is logged once per kind; supervision continues."""
        gap_seconds, self._polled_seconds = now_seconds - self._polled_seconds, now_seconds
        try:
            before, self._was_stopped = self._was_stopped, gap_seconds >= STOPPED_SECONDS
            if self._was_stopped and not before:  # one that is always slow would wait for ever
                self.run.postpone(gap_seconds)
            self.run.poll(now_seconds)
            self._note_end(now_seconds)
            if now_seconds >= self._commit_due_seconds:
                self.commit(now_seconds)
        except Exception as error:
            kind = type(error).__name__
            self._failures.note("run %s: polling the rings failed", self.run.name, kind=kind)

    def commit(self, now_seconds: float) -> None:
        """Write the account to the ledger."""
        begun_seconds = time.thread_time()
        self.run.commit()
        took_seconds = time.thread_time() - begun_seconds
        pause_seconds = max(COMMIT_INTERVAL_SECONDS, took_seconds / _COMMIT_SHARE)
        self._commit_due_seconds = now_seconds + pause_seconds

    def record_scrape(self, scraper: str, *, final: bool) -> None:
        """Count a delivered scrape; final: whether it showed the end of the run."""
        self._scrapes_total += 1
        if final and self.ended:
            self._final_seen = True
            self._final_seen_by.add(scraper)

    def final_exported(self, scrapes: ScrapeLog, now_seconds: float) -> bool:
        """Return whether the end was scraped by all regular scrapers, and by one at least."""
        self._final_seen_by &= scrapes.names
        awaited = scrapes.regulars(now_seconds) - self._final_seen_by
        return self.ended and self._final_seen and not awaited

    def needed(self, scrapes: ScrapeLog, now_seconds: float) -> bool:
        """Return whether data of the run was not delivered yet."""
        if not self.ended:
            return self.run.seen
        return self._scrapes_total > 0 and not self.final_exported(scrapes, now_seconds)

    def over(self, now_seconds: float) -> bool:
        """Return whether the linger period is over, or the run never began."""
        if not self.run.seen:
            return now_seconds - self._started_seconds >= FIRST_RING_SECONDS
        since = self._ended_since_seconds
        return since is not None and now_seconds - since >= self._linger_seconds

    def publish(
        self,
        endpoint: Endpoint | None,
        *,
        final_exported: bool,
        otlp_pending: bool = False,
        pushes_total: int = 0,
        final_pushed: bool = False,
        advertise: str = "",
    ) -> None:
        """Write the status file if it has changed.

        pushes_total: reports of this agent that the root accepted; advertise: see `AgentStatus`.
        """
        status = locations.AgentStatus(
            pid=os.getpid(),
            host=socket.gethostname(),
            port=endpoint.port if endpoint else 0,
            url=endpoint.url if endpoint else "",
            scrapes_total=self._scrapes_total,
            final_exported=final_exported,
            otlp_pending=otlp_pending,
            started_unix_ns=self._started_unix_ns,
            advertise=advertise,
            pushes_total=self._pushes_before + pushes_total,
            final_pushed=final_pushed,
        )
        if status == self._published:
            return
        try:
            locations.write_status(self.run.run_dir, status)
        except OSError as error:
            if str(error) not in self._unwritten:
                self._unwritten.add(str(error))
                log.warning("status of run %s cannot be written: %s", self.run.name, error)
            return
        self._published = status

    def remove(self) -> bool:
        """Delete all files of a run that is over, and release it.

        Returns False, and keeps the run, if a new attempt has appeared meanwhile.
        """
        run_dir = self.run.run_dir
        self.run.remove_rings()
        remove_files(run_dir, self.run.known_rings)
        self._remove_note()
        self._published = None
        if self.run.has_new_rings():
            return False
        unlink(locations.agent_lock_path(run_dir))
        self.release()
        remove_empty(run_dir)
        if run_dir.parent == default_directory():
            remove_empty(run_dir.parent)
        return True

    def release(self) -> None:
        """Release the run, leaving its files to the next node agent."""
        self.run.close()
        os.close(self._lock_fd)

    def _remove_note(self) -> None:
        """Delete the note of the root address, unless it is of an attempt that has just begun."""
        note = read_root_note(self.run.run_dir)
        if note is None or not self.run.seen or note.asked_by_unix_ns in self.run.created_unix_ns:
            unlink(root_note_path(self.run.run_dir))

    def _note_end(self, now_seconds: float) -> None:
        running, before = self.run.end is EndReason.RUNNING, self._session
        self._session = self.run.session
        if running or self._session != before:  # an attempt may begin and end between two polls
            self._ended_since_seconds = None
            self._final_seen = False
            self._final_seen_by.clear()
        if not running and self._ended_since_seconds is None:
            self._ended_since_seconds = now_seconds
            log.info("run %s: ended, %s", self.run.name, self.run.end.name.lower())
            if missing := self.run.missing_rows:
                log.warning(
                    "run %s: %d rows of other nodes have not come, and count as dropped records",
                    self.run.name,
                    missing,
                )


class RunRegistry:
    """All `RunSupervisor`s of this process, by run directory."""

    def __init__(
        self, settings: Settings, flight: FlightService, *, setting_errors: int = 0
    ) -> None:
        self.base: Path | None = None
        """Directory of which every run is watched; None: only those that are added explicitly."""
        self.listeners: list[Listener] = []
        """Called with the conditions of all runs that are added from now on."""
        self._settings = settings
        self._flight = flight
        self._setting_errors = setting_errors
        self._supervisors: dict[Path, RunSupervisor] = {}
        self._announced: tuple[int, Endpoint | None] | None = None
        """Lock of `base`, and the endpoint that was announced there."""
        self._released: dict[Path, list[Path]] = {}
        """Run directories that could not be locked or removed, with the rings that they held."""

    def __iter__(self) -> Iterator[RunSupervisor]:
        return iter(self._supervisors.values())

    def __len__(self) -> int:
        return len(self._supervisors)

    @property
    def shown(self) -> list[RunSupervisor]:
        """Those whose run has been seen."""
        return [supervisor for supervisor in self if supervisor.run.seen]

    @property
    def runs(self) -> list[Run]:
        """All runs, including those without a ring yet."""
        return [supervisor.run for supervisor in self]

    @property
    def directory(self) -> Path:
        """The directory that this agent watches: of a run, or of all runs."""
        return self.base or next(iter(self._supervisors), self._settings.dir)

    def add(self, run_dir: Path, lock_fd: int) -> None:
        """Watch one run, whose lock this process holds."""
        supervisor = self._supervisors[run_dir] = RunSupervisor(
            run_dir,
            lock_fd,
            self._settings,
            setting_errors=self._setting_errors,
            now_seconds=time.monotonic(),
        )
        supervisor.run.conditions.listeners.extend(self.listeners)

    def add_new(self) -> None:
        """Add the runs that have appeared in `base` and that no other agent watches."""
        if self.base is None:
            return
        for run_dir in locations.find_runs(self.base):
            if run_dir in self._supervisors:
                continue
            rings = locations.find_rings(run_dir)
            if not rings or self._released.get(run_dir) == rings:
                continue
            try:
                lock_fd = locations.hold_agent_lock(run_dir)
            except (OSError, RingError) as error:
                log.error("run directory %s cannot be locked: %s", run_dir, error)
                self._released[run_dir] = rings
                continue
            if lock_fd is not None:
                log.info("watching %s", run_dir)
                self.add(run_dir, lock_fd)

    def announce(self, endpoint: Endpoint | None) -> None:
        """Write the agent's status into `base`, where `doctor` and `top` find it between jobs.

        One agent does so where several watch the same directory. A failure is logged once.
        """
        if self.base is None or (self._announced is not None and self._announced[1] == endpoint):
            return
        lock_fd = -1 if self._announced is None else self._announced[0]
        self._announced = lock_fd, endpoint
        try:
            if lock_fd < 0:
                make_private_directory(self.base)
                lock_fd = locations.hold_agent_lock(self.base) or -1
                self._announced = lock_fd, endpoint
            if lock_fd >= 0:
                locations.write_status(
                    self.base,
                    locations.AgentStatus(
                        pid=os.getpid(),
                        host=socket.gethostname(),
                        port=endpoint.port if endpoint else 0,
                        url=endpoint.url if endpoint else "",
                        scrapes_total=0,
                        final_exported=False,
                        started_unix_ns=time.time_ns(),
                    ),
                )
        except (OSError, RingError) as error:
            log.info("status of the node agent is not written to %s: %s", self.base, error)

    def poll(self, now_seconds: float) -> None:
        """Poll all runs, start flight records that are due, and remove runs that are over."""
        for run_dir, supervisor in list(self._supervisors.items()):
            supervisor.poll(now_seconds)
            self._flight.poll(supervisor.run, now_seconds)
            busy = self._flight.busy(supervisor.run, now_seconds)
            if supervisor.over(now_seconds) and not busy and supervisor.remove():
                self._forget(run_dir)

    def _forget(self, run_dir: Path) -> None:
        run = self._supervisors.pop(run_dir).run
        self._flight.forget(run)
        # Not what has appeared since: that belongs to the next attempt, which is watched.
        known = set(run.known_rings)
        if left := [ring for ring in locations.find_rings(run_dir) if ring in known]:
            self._released[run_dir] = left

    def release(self) -> None:
        """Remove the runs that ended, and leave the others to the next node agent."""
        for supervisor in self:
            if not supervisor.ended or not supervisor.remove():
                supervisor.run.commit()
                supervisor.release()
        if self.base is not None and self._announced is not None and self._announced[0] >= 0:
            unlink(locations.agent_status_path(self.base))
            unlink(locations.agent_lock_path(self.base))
            os.close(self._announced[0])
            self._announced = None
            if self.base == default_directory():
                remove_empty(self.base)
