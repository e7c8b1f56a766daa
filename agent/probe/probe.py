"""The probe of one process: hooks, guard, tracker and recorder, wired together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.catalog.thresholds import resolve
from mp_agent.probe import hooks, placement
from mp_agent.probe.activations.sampling import ActivationSampling
from mp_agent.probe.activations.step import StepActivations
from mp_agent.probe.isolation.guard import Guard
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.optimizers.run_facts import ObservedTraits, main_script
from mp_agent.probe.recording.contained_recorder import ContainedRecorder
from mp_agent.probe.reports import ProbeReports
from mp_agent.probe.ring_connection import RingConnection
from mp_agent.probe.step.phases import PhaseMarks
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.step_tracker import StepTracker
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings


class Probe:
    """Watches one process. Nothing that it is asked to do raises.

    create_ring: called once the rank is known, see `RingConnection`. on_step: called at the end of
    each step of the run. ranks_in_run: the number of ranks that train together.
    """

    def __init__(
        self,
        create_ring: Callable[[], RingWriter | None],
        settings: Settings,
        *,
        on_step: Callable[[], None] = lambda: None,
        ranks_in_run: Callable[[], int] = placement.world_size,
    ) -> None:
        reports = self._reports = ProbeReports()
        self._guard = Guard(
            on_failure=reports.count_failure,
            on_capture=self._note_captured,
            on_rest=reports.note_rest,
            on_device_error=reports.note_device_error,
        )
        self._phases = PhaseMarks()
        self._registry = OptimizerRegistry(reports.note_unsupported, ranks_in_run)
        traits = ObservedTraits(script=main_script() if settings.check_script else "")
        recorder = self._recorder = ContainedRecorder(
            self._guard.contain, self._registry, traits, settings, self._activations(settings)
        )
        self._connection = RingConnection(create_ring, self._guard, reports, recorder, self._phases)
        context = TrackerContext(
            registry=self._registry,
            recorder=recorder,
            phases=self._phases,
            traits=traits,
            connection=self._connection,
        )
        self._tracker = StepTracker(context, self._guard, on_step)
        self._patches: hooks.Patches | None = None

    def attach(self, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> None:
        """Install the hooks. `model` and `optimizer` settle which ones are the run's, if given."""
        self._registry.settle(model, optimizer)
        self._patches = hooks.install(self._tracker, self._guard)

    def detach(self) -> None:
        """Remove all hooks. Not to be called from within an optimizer's step."""
        self._guard.closed = True
        self._recorder.close()
        if self._patches is not None:
            self._patches.restore()

    def connect(self) -> None:
        """Create the ring now instead of at the first hook that needs it."""
        self._guard.run("connect", self._connection.connect)

    def observe(
        self,
        *,
        loss: torch.Tensor | float | None = None,
        step: int | None = None,
        lr: float | None = None,
        tokens: int | None = None,
    ) -> None:
        """Use what the trainer reports of the step under way."""
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
        """Call `function`, unguarded, as soon as the hook that is running has returned."""
        self._guard.later(function)

    def flush(self) -> None:
        """Publish what was observed of the step under way, waiting for a device at most 1 s."""
        self._guard.run("flush", self._tracker.flush)

    def _activations(self, settings: Settings) -> StepActivations | None:
        if not settings.measure_activations:
            return None
        sampling = ActivationSampling(
            self._guard.run,
            lambda: self._phases.in_training,
            resolve(settings.thresholds)["fp16_near_overflow"],
        )
        return StepActivations(sampling, self._registry.note_unsupported)

    def _note_captured(self, event: Callable[..., None], arguments: Sequence[object]) -> None:
        self._reports.note_capture()
        self._tracker.captured(event, arguments)

    def _enter_phase(self, name: object) -> None:
        self._tracker.collect()
        self._phases.enter(str(name))
