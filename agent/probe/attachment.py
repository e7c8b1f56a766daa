"""One process's ties: its ring, its probe, the node agent it keeps running, and its end."""

import errno
import logging
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn, optim

from mp_agent.errors import RingError
from mp_agent.probe.identity.process_group import Members
from mp_agent.probe.identity.rank_identity import make_identity, ranks_are_known, ranks_are_numbered
from mp_agent.probe.placement import world_size
from mp_agent.probe.probe import Probe
from mp_agent.probe.processes.condition_callbacks import ConditionCallback, ConditionCallbacks
from mp_agent.probe.processes.exit import ExitHandler, wait_for_export
from mp_agent.probe.processes.helpers import is_helper
from mp_agent.probe.processes.node_agent import NodeAgentLauncher, RootSearch
from mp_agent.probe.processes.signals import SignalLog
from mp_agent.probe.ring_connection import ConnectLater
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")

RETRY_SECONDS = 10.0
_SHORT_OF = frozenset(
    (
        errno.EAGAIN,
        errno.EDQUOT,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOLCK,
        errno.ENOMEM,
        errno.ENOSPC,
    )
)
"""What a machine may have again a moment later."""

_STARTS_AT_MOST = 1000

_rings_made: list[str] = []
"""Launches under which this process has made rings."""


class Attachment:
    """Everything that `init()` set up. The ring is made as soon as the rank is known.

    Without torchrun's variables and before `init_process_group` the rank is not known; the ring is
    then made at the first backward. So it is in a child of multiprocessing: it may be a rank, or a
    data worker that ran the script's `init()` by importing it, and must not pass for a rank.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        setting_errors: int,
        callbacks: Sequence[ConditionCallback] = (),
        members: Members | None = None,
        asked_for: bool = True,
    ) -> None:
        """Prepare; asked_for: by a call in the program, not by the environment."""
        self._settings = settings
        self._members = members
        self._setting_errors = setting_errors
        self._callbacks = callbacks
        self._identity: RankIdentity | None = None
        self._run_dir = Path()
        self._writer: RingWriter | None = None
        self._launcher: NodeAgentLauncher | None = None
        self._search: RootSearch | None = None
        self._conditions: ConditionCallbacks | None = None
        self.by_environment = not asked_for
        self._asked_for = asked_for and not _is_importing_main()
        self._next_try_seconds = 0.0
        self._exit_recorded = False
        self._exit = ExitHandler(self._end)
        self._signals = SignalLog()
        self.probe = Probe(
            self._connect,
            settings,
            on_step=self._on_step,
            ranks_in_run=world_size if members is None else lambda: len(members.ranks),
        )

    def begin(self, model: nn.Module | None, optimizer: optim.Optimizer | None) -> None:
        """Attach the hooks to torch and to the interpreter's exit."""
        self.probe.attach(model=model, optimizer=optimizer)
        self._exit.install()
        self._signals.arm()
        # The name, since a spawned child learns of its parent only after it imported the script.
        if self.by_environment:
            return
        if ranks_are_known() and multiprocessing.current_process().name == "MainProcess":
            self.probe.connect()

    def abandon(self) -> None:
        """Take away what `begin` had installed when it failed."""
        self._exit.remove()
        self.probe.detach()

    def shutdown(self) -> None:
        """End as completed and remove all hooks."""
        self._exit.remove()
        if self._writer is not None and self._exit_recorded:
            self._writer.record_exit_status(False)
        self._end(EndReason.COMPLETED)
        if self._writer is not None:
            self._writer.close()  # the process goes on, this rank does not
        self._signals.disarm()

    @property
    def connected(self) -> bool:
        """Whether this process has a ring."""
        return self._writer is not None

    def withdraw(self) -> None:
        """Take away what was attached to a process that has no ring yet."""
        self._exit.remove()
        self._signals.disarm()
        self.probe.detach()

    def _connect(self) -> RingWriter | None:
        """Make this rank's ring; None, with one log line, when that is not possible.

        Raises ConnectLater where the machine is short of something at the moment.
        """
        now_seconds = time.monotonic()
        if now_seconds < self._next_try_seconds:
            raise ConnectLater
        identity = _of_this_start(make_identity(self._settings.run, members=self._members))
        if is_helper(
            identity,
            self._settings.dir,
            asked_for=self._asked_for,
            numbered_by_environment=ranks_are_numbered(),
        ):
            log.debug("process %d is a helper of a rank, and not watched", os.getpid())
            return None
        run_dir = locations.run_directory(self._settings.dir, identity.run)
        try:
            identity = _after_earlier_start(run_dir, identity)
            writer = RingWriter.create(locations.ring_path(run_dir, identity), identity)
        except (OSError, RingError) as error:
            pass_on(error)
            if isinstance(error, OSError) and error.errno in _SHORT_OF:
                if not self._next_try_seconds:
                    log.warning("no ring can be made yet, training goes on meanwhile: %s", error)
                self._next_try_seconds = now_seconds + RETRY_SECONDS
                raise ConnectLater from error
            log.warning("no ring can be made, training goes on unwatched: %s", error)
            return None
        writer.count(setting_errors=self._setting_errors)
        self._identity, self._run_dir, self._writer = identity, run_dir, writer
        self._note_the_end(writer)
        _rings_made.append(identity.launch)
        self._conditions = ConditionCallbacks(
            run_dir,
            self._callbacks,
            logs=identity.rank == 0,
            on_failure=partial(writer.count, probe_errors=1),
        )
        try:
            self._start_helpers(identity, run_dir, writer)
        except Exception as error:
            pass_on(error)
            writer.count(probe_errors=1)
            log.warning("the node agent cannot be started: %r", error)
        return writer

    def _start_helpers(self, identity: RankIdentity, run_dir: Path, writer: RingWriter) -> None:
        if identity.local_rank == 0 and self._settings.node_agent == "spawn":
            self._warn_of_other_job(identity)
            self._launcher = NodeAgentLauncher(run_dir, self._settings)
            self._launcher.ensure_running()
        if _meets_other_nodes(identity, self._settings):
            self._search = RootSearch(writer.path, self._settings)
            self._search.begin()

    def _warn_of_other_job(self, identity: RankIdentity) -> None:
        """Log when another job of the same name runs on this node: the agent reads one of them."""
        if locations.other_jobs(self._run_dir, identity):
            log.warning(
                "another job named %r runs on this node: as long as it does, this one is not "
                "recorded. Give each a name of its own (MP_AGENT_RUN)",
                identity.run,
            )

    def _note_the_end(self, writer: RingWriter) -> None:
        """Attach to the end of this process, which may be a child of the one that attached."""
        self._exit.install()
        self._signals.arm()
        try:
            writer.record_exit_status()
            self._exit_recorded = True
        except (OSError, AttributeError) as error:
            log.debug("the exit status cannot be recorded: %s", error)

    def _on_step(self) -> None:
        self._signals.look()
        if self._conditions is not None and (found := self._conditions.look()):
            self.probe.later(partial(self._conditions.tell, found))
        if self._launcher is not None:
            self._launcher.ensure_running()
        if self._search is not None:
            self._search.look_after()

    def _end(self, reason: EndReason | None) -> None:
        """Write what is open and the reason; local rank 0 of a good end waits for the export.

        A process that was asked to end, and may be killed soon, waits for nothing. Without a
        reason the exit status tells, if it can be recorded.
        """
        writer = self._writer
        if writer is None or self._identity is None or os.getpid() != self._identity.pid:
            self.probe.detach()
            return
        self.probe.flush()
        self.probe.detach()
        if reason is not None or not self._exit_recorded:
            writer.end(reason or EndReason.COMPLETED)
        if self._launcher is None:
            return
        # The last occasion: without an agent nothing would read the end and the last steps.
        self._keep_reading(at_once=True)
        if reason is EndReason.COMPLETED:
            wait_for_export(
                writer,
                self._run_dir,
                self._settings.exit_wait_seconds,
                self._settings.otlp_exit_wait_seconds,
                ensure_running=self._keep_reading,
                in_a_hurry=lambda: self._signals.asked_to_end,
            )
            self._keep_reading(at_once=True)

    def _keep_reading(self, *, at_once: bool = False) -> bool:
        """Start an agent in place of one that died; return whether one runs or is being started.

        One that has served the end for as long as it was to has taken the ring away.
        """
        if self._launcher is None or self._writer is None or not self._writer.path.exists():
            return False
        return self._launcher.ensure_running(at_once=at_once)


def _is_importing_main() -> bool:
    """Return whether this is a spawned child that imports the program for what it defines."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _of_this_start(identity: RankIdentity) -> RankIdentity:
    """Return the identity under a launch of its own where this process has made rings before.

    After `shutdown()` the ranks begin the run's next attempt, as if they had been started again.
    """
    if not _rings_made:
        return identity
    return replace(identity, launch=f"{identity.launch}-{len(_rings_made)}")


def _after_earlier_start(run_dir: Path, identity: RankIdentity) -> RankIdentity:
    """Return the identity under a launch of its own where a dead process has left its ring.

    A launcher may start its ranks again without a word of it, and a program execute itself anew.
    """
    launch = identity.launch
    for number in range(1, _STARTS_AT_MOST):
        ring = locations.ring_path(run_dir, identity)
        if not ring.exists() or locations.is_live(ring):
            break
        identity = replace(identity, launch=f"{launch}-{number}")
    return identity


def _meets_other_nodes(identity: RankIdentity, settings: Settings) -> bool:
    """Return whether this rank is to find out, for the node agent beside it, where the root is."""
    if identity.world_size <= identity.local_world_size or settings.node_agent == "none":
        return False
    known = bool(settings.root) and bool(settings.token.get_secret_value())
    return not known and (identity.rank == 0 or identity.local_rank == 0)
