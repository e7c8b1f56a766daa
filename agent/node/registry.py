"""The runs in a node agent's care: taken on when they appear, let go when they are over."""

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
    """All `RunSupervisor`es of this process, by the directories of their runs."""

    def __init__(
        self, settings: Settings, flight: FlightService, *, setting_errors: int = 0
    ) -> None:
        self.base: Path | None = None
        """Directory in which every run is taken on; None: only those that are handed over."""
        self.listeners: list[Listener] = []
        """They hear of the conditions of all runs that are taken on from now on."""
        self._settings = settings
        self._flight = flight
        self._setting_errors = setting_errors
        self._watches: dict[Path, RunSupervisor] = {}
        self._let_go: dict[Path, list[Path]] = {}
        """Run directories that could not be taken or removed, and the rings that they held."""

    def __iter__(self) -> Iterator[RunSupervisor]:
        return iter(self._watches.values())

    def __len__(self) -> int:
        return len(self._watches)

    @property
    def shown(self) -> list[RunSupervisor]:
        """Those that have something to show."""
        return [watch for watch in self if watch.run.seen]

    @property
    def runs(self) -> list[Run]:
        """All runs, those included that nobody has seen yet."""
        return [watch.run for watch in self]

    @property
    def directory(self) -> Path:
        """What this agent watches: the directory of a run, or of all runs."""
        return self.base or next(iter(self._watches), self._settings.dir)

    def take_on(self, run_dir: Path, lock_fd: int) -> None:
        """Take charge of one run, whose lock is held."""
        watch = self._watches[run_dir] = RunSupervisor(
            run_dir,
            lock_fd,
            self._settings,
            setting_errors=self._setting_errors,
            now_seconds=time.monotonic(),
        )
        watch.run.conditions.listeners.extend(self.listeners)

    def find_new(self) -> None:
        """Take on the runs that have appeared in the base and that nobody else watches."""
        if self.base is None:
            return
        for run_dir in locations.find_runs(self.base):
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
                self.take_on(run_dir, lock_fd)

    def look(self, now_seconds: float) -> None:
        """Read all rings, have records written of what they show, let go of what is over."""
        for run_dir, watch in list(self._watches.items()):
            watch.poll(now_seconds)
            self._flight.look(watch.run, now_seconds)
            busy = self._flight.busy(watch.run, now_seconds)
            if watch.over(now_seconds) and not busy and watch.remove():
                self._flight.forget(watch.run)
                del self._watches[run_dir]
                if run_dir.exists():
                    self._let_go[run_dir] = locations.find_rings(run_dir)

    def release(self) -> None:
        """Remove the runs that ended, and leave the others to the next node agent."""
        for watch in self:
            if not watch.ended or not watch.remove():
                watch.run.commit()
                watch.release()
