"""The runs that a node agent watches: added when they appear, removed when they are over."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

from mp_agent.errors import RingError
from mp_agent.node.conditions.tracker import Listener
from mp_agent.node.flight.service import FlightService
from mp_agent.node.run.run import Run
from mp_agent.node.supervisor import RunSupervisor
from mp_agent.ring import locations
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")


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

    def poll(self, now_seconds: float) -> None:
        """Poll all runs, start flight records that are due, and remove runs that are over."""
        for run_dir, supervisor in list(self._supervisors.items()):
            supervisor.poll(now_seconds)
            self._flight.poll(supervisor.run, now_seconds)
            busy = self._flight.busy(supervisor.run, now_seconds)
            if supervisor.over(now_seconds) and not busy and supervisor.remove():
                self._flight.forget(supervisor.run)
                del self._supervisors[run_dir]
                if run_dir.exists():
                    self._released[run_dir] = locations.find_rings(run_dir)

    def release(self) -> None:
        """Remove the runs that ended, and leave the others to the next node agent."""
        for supervisor in self:
            if not supervisor.ended or not supervisor.remove():
                supervisor.run.commit()
                supervisor.release()
