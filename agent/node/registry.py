"""The runs that a node agent watches: added when they appear, removed when they are over."""

import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from mp_agent.errors import RingError
from mp_agent.node.conditions.tracker import Listener
from mp_agent.node.endpoint import Endpoint
from mp_agent.node.flight.service import FlightService
from mp_agent.node.leftovers import remove_empty, unlink
from mp_agent.node.run.run import Run
from mp_agent.node.supervisor import RunSupervisor
from mp_agent.ring import locations
from mp_agent.ring.files import make_private_directory
from mp_agent.settings import Settings, default_directory

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
        if self.base is not None and self._announced is not None and self._announced[0] >= 0:
            unlink(locations.agent_status_path(self.base))
            unlink(locations.agent_lock_path(self.base))
            os.close(self._announced[0])
            self._announced = None
            if self.base == default_directory():
                remove_empty(self.base)
