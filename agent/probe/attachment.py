"""Attaches the probe to this process: its ring, its hooks, its node agent, and its exit."""

import logging
import multiprocessing
import os
import time
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import nn, optim

from mp_agent.probe.placement import world_size
from mp_agent.probe.probe import Probe
from mp_agent.probe.processes.callbacks import (
    CheckpointCallback,
    CheckpointCallbacks,
    ConditionCallback,
    ConditionCallbacks,
)
from mp_agent.probe.processes.exit import ExitHandler, SignalLog, wait_for_export
from mp_agent.probe.processes.launchers import Members
from mp_agent.probe.processes.node_agent import (
    KernelCompiler,
    NodeAgentLauncher,
    RootSearch,
    searches_root,
)
from mp_agent.probe.processes.rank_identity import ranks_are_known
from mp_agent.probe.ring_connection import RankRing, RankRingFactory
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")

POLL_INTERVAL_SECONDS = 1.0


class Attachment:
    """Everything that `init()` sets up. The ring is created as soon as the rank is known.

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
        checkpoint_callbacks: Sequence[CheckpointCallback] = (),
        members: Members | None = None,
        group: dist.ProcessGroup | None = None,
        asked_for: bool = True,
        awaits_optimizer: bool = False,
    ) -> None:
        """Install nothing yet; asked_for: by a call in the program, not by the environment.

        group: of the members, where it is not the job's own. awaits_optimizer: there is no ring
        before there is an optimizer, or as many backwards as only training makes.
        """
        self._settings = settings
        self._setting_errors = setting_errors
        self._callbacks = callbacks
        self._checkpoints = CheckpointCallbacks(checkpoint_callbacks, self._count_failure)
        self._rings = RankRingFactory(settings, members, asked_for=asked_for)
        self._ring: RankRing | None = None
        self._launcher: NodeAgentLauncher | None = None
        self._search: RootSearch | None = None
        self._kernels: KernelCompiler | None = None
        self._conditions: ConditionCallbacks | None = None
        self.by_environment = not asked_for
        self._exit_recorded = False
        self._exit = ExitHandler(self._end)
        self._signals = SignalLog()
        self._next_poll_seconds = 0.0
        self.probe = Probe(
            self._connect,
            settings,
            on_step=self._on_step,
            ranks_in_run=world_size if members is None else lambda: len(members.ranks),
            group=lambda: group,
            awaits_optimizer=awaits_optimizer,
        )
        self._requests = self.probe.requests

    def begin(self, model: nn.Module | None, optimizer: optim.Optimizer | None) -> None:
        """Install the hooks on torch and on the interpreter's exit."""
        self.probe.attach(model=model, optimizer=optimizer)
        self._exit.install()
        self._signals.arm()
        # The name, since a spawned child learns of its parent only after it imported the script.
        if self.by_environment:
            return
        if ranks_are_known() and multiprocessing.current_process().name == "MainProcess":
            self.probe.connect()

    def abandon(self) -> None:
        """Remove what `begin` had installed when it failed."""
        self._exit.remove()
        self.probe.detach()

    def shutdown(self) -> None:
        """End as completed and remove all hooks."""
        self._exit.remove()
        if self._ring is not None and self._exit_recorded:
            self._ring.writer.record_exit_status(False)
        self._end(EndReason.COMPLETED)
        if self._ring is not None:
            self._ring.writer.close()  # the process goes on, this rank does not
        self._signals.disarm()

    @property
    def connected(self) -> bool:
        """Whether this process has a ring."""
        return self._ring is not None

    @property
    def status_url(self) -> str | None:
        """Address of the node agent that reads this ring; None while none serves."""
        if self._ring is None or not locations.agent_running(self._ring.run_dir):
            return None
        status = locations.read_status(self._ring.run_dir)
        return status.url or None if status is not None else None

    def withdraw(self) -> None:
        """Remove all hooks from a process that has no ring yet."""
        self._exit.remove()
        self._signals.disarm()
        self.probe.detach()

    def _connect(self) -> RingWriter | None:
        """Create this rank's ring, and start what belongs to it; see `RankRingFactory.create`."""
        if self._ring is None:  # else a signal handler has raised in what follows
            self._ring = self._rings.create()
            if self._ring is None:
                return None
            self._ring.writer.count(setting_errors=self._setting_errors)
        ring = self._ring
        self._note_the_end(ring.writer)
        self._conditions = ConditionCallbacks(
            ring.run_dir,
            self._callbacks,
            logs=ring.identity.rank == 0,
            on_failure=partial(ring.writer.count, probe_errors=1),
        )
        try:
            self._start_processes(ring)
        except Exception as error:
            pass_on(error)
            ring.writer.count(probe_errors=1)
            log.warning("the node agent cannot be started: %r", error)
        return ring.writer

    def _start_processes(self, ring: RankRing) -> None:
        """Start the node agent, and the search for the root agent, where they are this rank's."""
        if ring.identity.local_rank == 0 and self._settings.node_agent == "spawn":
            _warn_of_other_job(ring)
            self._launcher = NodeAgentLauncher(ring.run_dir, self._settings)
            self._launcher.ensure_running()
        if ring.identity.local_rank == 0:
            self._kernels = KernelCompiler(self._settings)
            self._kernels.begin()
        if searches_root(ring.identity, self._settings):
            self._search = RootSearch(ring.writer.path, self._settings)
            self._search.begin()

    def _note_the_end(self, writer: RingWriter) -> None:
        """Record how this process ends, which may be a child of the one that attached."""
        self._exit.install()
        self._signals.arm()
        try:
            writer.record_exit_status()
            self._exit_recorded = True
        except (OSError, AttributeError) as error:
            log.debug("the exit status cannot be recorded: %s", error)

    def _count_failure(self) -> None:
        if self._ring is not None:
            self._ring.writer.count(probe_errors=1)

    def _on_step(self) -> None:
        requests = self._requests
        if requests is not None and (step := requests.take_unreported()) is not None:
            self.probe.later(partial(self._checkpoints.call, step))
        now_seconds = time.monotonic()
        if now_seconds >= self._next_poll_seconds:
            self._next_poll_seconds = now_seconds + POLL_INTERVAL_SECONDS
            self._poll()

    def _poll(self) -> None:
        """Look after signals, conditions, and the processes that belong to this rank."""
        if self._ring is not None and not self._ring.writer.has_descriptor:
            log.warning(
                "the program has closed all its descriptors, and mp_agent's with them: training "
                "goes on unwatched, and the node agent takes this rank for one that was killed"
            )
            self.probe.later(self.withdraw)
            return
        if self._ring is not None and self._ring.writer.is_truncated:
            log.warning(
                "another process has truncated %s: training goes on unwatched",
                self._ring.writer.path,
            )
            self.probe.later(self.withdraw)
            return
        self._signals.poll()
        if self._conditions is not None and (found := self._conditions.poll()):
            self.probe.later(partial(self._conditions.deliver, found))
        if self._launcher is not None:
            self._launcher.ensure_running()
        if self._kernels is not None:
            self._kernels.poll()
        if self._search is not None:
            self._search.retry_if_due()

    def _end(self, reason: EndReason | None) -> None:
        """Write the open step and the reason; after success local rank 0 waits for the export.

        A process that was asked to end, and may be killed soon, waits for nothing. Without a
        reason the exit status gives it, if it can be recorded.
        """
        ring = self._ring
        if ring is None or os.getpid() != ring.identity.pid:
            self.probe.detach()
            return
        self.probe.flush()
        self.probe.detach()
        if reason is not None or not self._exit_recorded:
            ring.writer.end(reason or EndReason.COMPLETED)
        if self._launcher is None:
            return
        # The last opportunity: without an agent nothing would read the end and the last steps.
        self._keep_reading(at_once=True)
        if reason is EndReason.COMPLETED:
            wait_for_export(
                ring.writer,
                ring.run_dir,
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
        ring = self._ring
        if self._launcher is None or ring is None or not os.path.exists(ring.writer.path):
            return False
        return self._launcher.ensure_running(at_once=at_once)


def _warn_of_other_job(ring: RankRing) -> None:
    """Log when another job of the same name runs on this node: the agent reads one of them."""
    if locations.other_jobs(ring.run_dir, ring.identity):
        log.warning(
            "another job named %r runs on this node: as long as it does, this one is not "
            "recorded. Give each a name of its own (MP_AGENT_RUN)",
            ring.identity.run,
        )
