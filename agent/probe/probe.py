"""The probe of one process: hooks, guard, and what follows the steps, wired together."""

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe import hooks, placement
from mp_agent.probe.contained_recorder import ContainedRecorder
from mp_agent.probe.isolation.guard import Guard
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.optimizers.run_facts import ObservedTraits
from mp_agent.probe.step.phases import PhaseMarks
from mp_agent.probe.tracker import StepTracker, TrackerCallbacks
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")


class ConnectLater(Exception):
    """The ring cannot be made at the moment; it is to be tried again."""


class Probe:
    """Watches one process. Nothing that it is asked to do raises.

    `connect` makes the ring once the rank is known, or returns None when that is not possible; the
    probe then does nothing. It raises ConnectLater to be called again at the next backward.
    `on_step` is called at the end of each step.
    """

    def __init__(
        self,
        connect: Callable[[], RingWriter | None],
        settings: Settings,
        *,
        on_step: Callable[[], None] = lambda: None,
        ranks_in_run: Callable[[], int] = placement.world_size,
    ) -> None:
        self._make_writer = connect
        self._writer: RingWriter | None = None
        self._early_notes: list[str] = []
        self._noted: set[str] = set()
        self._early_failures = 0
        self._guard = Guard(
            on_failure=self._count_failure,
            on_capture=self._note_capture,
            on_rest=self._note_rest,
        )
        contain = self._guard.contain
        self._phases = PhaseMarks()
        self._subjects = OptimizerRegistry(self._note_unsupported, ranks_in_run)
        traits = ObservedTraits()
        self._recorder = ContainedRecorder(contain, self._subjects, traits, settings)
        calls = TrackerCallbacks(
            connect=partial(contain, "connecting", self._connect),
            on_step_end=partial(contain, "looking after the run", on_step),
            take_probe_seconds=self._guard.take_seconds,
            note_unsupported=self._note_unsupported,
        )
        self._tracker = StepTracker(self._subjects, self._recorder, self._phases, traits, calls)
        self._patches: hooks.Patches | None = None

    def attach(self, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> None:
        """Install the hooks. `model` and `optimizer` settle which ones count, if given."""
        self._subjects.settle(model, optimizer)
        self._patches = hooks.install(self._tracker, self._guard)

    def detach(self) -> None:
        """Take all hooks away. Not to be called from within an optimizer's step."""
        self._guard.closed = True
        if self._patches is not None:
            self._patches.restore()

    def connect(self) -> None:
        """Make the ring now instead of at the first hook that needs it."""
        self._guard.run("connect", self._connect)

    def observe(
        self,
        *,
        loss: torch.Tensor | float | None = None,
        step: int | None = None,
        lr: float | None = None,
        tokens: int | None = None,
    ) -> None:
        """Take what the trainer says of the step under way."""
        self._guard.run("observe", self._tracker.observe, loss, step, lr, tokens)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a stretch that is not training."""
        self._guard.run("phase", self._enter_phase, name)
        try:
            yield
        finally:
            self._guard.run("phase", self._phases.leave)

    def later(self, function: Callable[[], None]) -> None:
        """Call `function`, unguarded, as soon as the hook that is being served has returned."""
        self._guard.later(function)

    def flush(self) -> None:
        """Publish what was seen of the step under way, waiting for a device at most 1 s."""
        self._guard.run("flush", self._tracker.flush)

    def _enter_phase(self, name: object) -> None:
        self._phases.enter(str(name))

    def _connect(self) -> None:
        if self._writer is not None:
            return
        try:
            writer = self._make_writer()
        except ConnectLater:
            return
        if writer is None:
            self._guard.closed = True
            return
        self._writer = writer
        _close_in_forked_children(self._guard)
        self._recorder.write_to(writer)
        self._phases.stamp_into(writer)
        writer.count(probe_errors=self._early_failures)
        for feature in self._early_notes:
            writer.note_unsupported(feature)

    def _count_failure(self) -> None:
        if self._writer is None:
            self._early_failures += 1
        else:
            self._writer.count(probe_errors=1)

    def _note_rest(self, kind: str) -> None:
        self._note_unsupported(f"{kind}, which keeps failing")

    def _note_capture(self) -> None:
        self._note_unsupported("CUDA graph capture")

    def _note_unsupported(self, feature: str) -> None:
        if feature not in self._noted:
            self._noted.add(feature)
            log.warning("mp_agent does not measure this: %s; the rest of it goes on", feature)
        if self._writer is not None:
            self._writer.note_unsupported(feature)
        elif feature not in self._early_notes:
            self._early_notes.append(feature)


def _close_in_forked_children(guard: Guard) -> None:
    """Have the hooks do nothing in children that this process forks: they are no ranks."""
    reference = weakref.ref(guard)

    def close() -> None:
        if (own := reference()) is not None:
            own.closed = True

    os.register_at_fork(after_in_child=close)
