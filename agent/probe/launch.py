"""Local rank 0 starts the node agent, and starts it again when it dies.

On runs of several nodes it also starts what finds the root agent for it.
"""

import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import mp_agent
from mp_agent.probe.rendezvous import LIFE_SECONDS
from mp_agent.ring import locations
from mp_agent.ring.root_note import read_root_note
from mp_agent.settings import Settings
from mp_agent.settings.handover import handed_over

log = logging.getLogger("mp_agent")

RESTARTS_AT_MOST = 3
CHECK_INTERVAL_SECONDS = 2.0


class NodeAgentLauncher:
    """Keeps one node agent running for a run on this node. Used by local rank 0 alone."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._starts_left = 1 + RESTARTS_AT_MOST
        self._next_check = 0.0
        self._starter: subprocess.Popen[bytes] | None = None

    def ensure_running(self) -> None:
        """Start the node agent unless one runs; looks at most every 2 s and never waits.

        An agent that lingers from an earlier attempt of the run counts: it takes the new one up.
        After three restarts it gives up with one log line.
        """
        now = time.monotonic()
        if now < self._next_check or self._starts_left == 0:
            return
        self._next_check = now + CHECK_INTERVAL_SECONDS
        if self._starting() or locations.agent_running(self._run_dir):
            return
        self._starts_left -= 1
        self._starter = start_node_agent(["--run-dir", str(self._run_dir)], self._settings)
        if self._starts_left == 0:
            log.warning("the node agent died %d times; it is not started again", RESTARTS_AT_MOST)

    def _starting(self) -> bool:
        """Return whether the process that detaches the agent is still at it; reap it when not."""
        return self._starter is not None and self._starter.poll() is None


class RootSearch:
    """Has the root agent looked for, for the node agent beside the rank that writes `ring`.

    Once more after the first search if that was in vain: without torchrun a job has no store before
    it makes its process group, which may be long after `init()`.
    """

    def __init__(self, ring: Path, settings: Settings) -> None:
        self._ring = ring
        self._settings = settings
        self._starter: subprocess.Popen[bytes] | None = None
        self._over_seconds = 0.0
        """When the first search has ended; infinite after the second."""

    def begin(self) -> None:
        """Start a search. One that cannot be started is a line in the log."""
        self._over_seconds = time.monotonic() + LIFE_SECONDS
        try:
            self._starter = start_rendezvous(self._ring, self._settings)
        except OSError as error:
            log.warning("the root node agent is not looked for: %s", error)

    def look_after(self) -> None:
        """Search again if it is time to, at the end of a step. Never waits."""
        if self._starter is not None and self._starter.poll() is not None:
            self._starter = None
        if time.monotonic() >= self._over_seconds:
            if not self._answered():
                self.begin()
            self._over_seconds = math.inf

    def _answered(self) -> bool:
        note = read_root_note(self._ring.parent.parent)
        return note is not None and not note.problem


def start_node_agent(arguments: list[str], settings: Settings) -> subprocess.Popen[bytes]:
    """Start a detached node agent and return the short-lived process that detaches it."""
    return _start_detached(["mp_agent.node", "--detach", *arguments], settings)


def start_rendezvous(ring: Path, settings: Settings) -> subprocess.Popen[bytes]:
    """Start the process that finds the root agent on behalf of the rank that writes `ring`."""
    return _start_detached(["mp_agent.probe.rendezvous", "--ring", str(ring)], settings)


def _start_detached(module: list[str], settings: Settings) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE`, which detaches itself, and return the process that does so.

    The other one gets its own session and none of this process's descriptors, so nothing that
    waits for the job's processes or pipes ever waits for it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", *module],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=_environment(settings),
        start_new_session=True,
        close_fds=True,
    )


def _environment(settings: Settings) -> dict[str, str]:
    """Return the variables of a process that works with these settings."""
    environment = {**os.environ, **handed_over(settings)}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (environment.get("PYTHONPATH"), str(Path(mp_agent.__file__).parent.parent)))
    )
    return environment
