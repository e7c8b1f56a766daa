"""One process's ties: its ring, its probe, the node agent it keeps running, and its end."""

import logging
import multiprocessing
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import nn, optim

from mp_agent.errors import RingError
from mp_agent.probe.conditions import ConditionCallback, ConditionWatch
from mp_agent.probe.exit import ExitWatch, wait_for_export
from mp_agent.probe.identity import make_identity, ranks_are_known
from mp_agent.probe.launch import NodeAgentLauncher, RootSearch
from mp_agent.probe.members import Members
from mp_agent.probe.placement import world_size
from mp_agent.probe.session import Probe
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")


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
    ) -> None:
        self._settings = settings
        self._members = members
        self._setting_errors = setting_errors
        self._callbacks = callbacks
        self._identity: RankIdentity | None = None
        self._run_dir = Path()
        self._writer: RingWriter | None = None
        self._launcher: NodeAgentLauncher | None = None
        self._search: RootSearch | None = None
        self._conditions: ConditionWatch | None = None
        self._exit = ExitWatch(self._end)
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
        # The name, since a spawned child learns of its parent only after it imported the script.
        if ranks_are_known() and multiprocessing.current_process().name == "MainProcess":
            self.probe.connect()

    def shutdown(self) -> None:
        """End as completed and remove all hooks."""
        self._exit.remove()
        self._end(EndReason.COMPLETED)

    def _connect(self) -> RingWriter | None:
        """Make this rank's ring; None, with one log line, when that is not possible."""
        identity = make_identity(self._settings.run, members=self._members)
        run_dir = locations.run_directory(self._settings.dir, identity.run)
        try:
            writer = RingWriter.create(locations.ring_path(run_dir, identity), identity)
        except (OSError, RingError) as error:
            log.warning("no ring can be made, training goes on unwatched: %s", error)
            return None
        writer.count(setting_errors=self._setting_errors)
        self._identity, self._run_dir, self._writer = identity, run_dir, writer
        self._conditions = ConditionWatch(
            run_dir,
            self._callbacks,
            logs=identity.rank == 0,
            on_failure=partial(writer.count, probe_errors=1),
        )
        if identity.local_rank == 0 and self._settings.node_agent == "spawn":
            self._launcher = NodeAgentLauncher(run_dir, self._settings)
            self._launcher.ensure_running()
        if _meets_other_nodes(identity, self._settings):
            self._search = RootSearch(writer.path, self._settings)
            self._search.begin()
        return writer

    def _on_step(self) -> None:
        if self._conditions is not None and (found := self._conditions.look()):
            self.probe.later(partial(self._conditions.tell, found))
        if self._launcher is not None:
            self._launcher.ensure_running()
        if self._search is not None:
            self._search.look_after()

    def _end(self, reason: EndReason) -> None:
        """Write what is open and the reason; local rank 0 of a good end waits for the export."""
        writer = self._writer
        if writer is None or self._identity is None or os.getpid() != self._identity.pid:
            self.probe.detach()
            return
        self.probe.flush()
        self.probe.detach()
        writer.end(reason)
        if self._launcher is not None and reason is EndReason.COMPLETED:
            wait_for_export(
                writer,
                self._run_dir,
                self._settings.exit_wait_seconds,
                self._settings.otlp_exit_wait_seconds,
            )


def _meets_other_nodes(identity: RankIdentity, settings: Settings) -> bool:
    """Return whether this rank is to find out, for the node agent beside it, where the root is."""
    if identity.world_size <= identity.local_world_size or settings.node_agent == "none":
        return False
    known = bool(settings.root) and bool(settings.token.get_secret_value())
    return not known and (identity.rank == 0 or identity.local_rank == 0)
