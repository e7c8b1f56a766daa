"""What the parts of the tracker share: the watched optimizers, the open step, the threads."""

import weakref
from dataclasses import dataclass, field
from threading import get_ident

from torch import nn
from torch.amp import GradScaler

from mp_agent.probe.instruments.batches import TokenTargets
from mp_agent.probe.instruments.instrument import Evaluations, Instruments
from mp_agent.probe.optimizers.loop_order import LoopOrder
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.optimizers.roles import FewWeights, Role, WatchedOptimizer
from mp_agent.probe.recording.recorder import StepRecorder
from mp_agent.probe.recording.run_facts import ObservedTraits
from mp_agent.probe.ring_connection import RingConnection
from mp_agent.probe.scalars import Scalar, reciprocal
from mp_agent.probe.step.boundaries import STATE_KNOWN_STEP, StepBoundaries, TrainerStep
from mp_agent.probe.step.data import Loaders, Seeds
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.step.phases import PhaseMarks, StepParts
from mp_agent.probe.step.thread_progress import ThreadProgress
from mp_agent.records.columns import NOTHING_LOADED, RESUMED_WITHOUT_STATE, SCHEDULE_BEHIND
from mp_agent.records.steps import Phase

_LEAD_MAX = 2**53
"""Beyond it there are integers that no float is equal to, and soon none that a record can hold."""
STEP_TOO_LARGE = "a step number of the trainer's beyond 2**53"


@dataclass(slots=True)
class _UnmatchedState:
    """A state of so many tensors, of which a module has none."""

    tensors: int
    weights: FewWeights
    """Those of the module, as it was left with."""
    stays: Scalar | None = None
    """Whether it had them still at the first backward; None where that is not known."""
    is_compared: bool = False


class LoadedStates:
    """Finds that a state was to be loaded into the model, and nothing of it was.

    What is loaded into a part of the model, or into what it is a part of, makes up for it, and what
    the script copies into it by hand.
    """

    def __init__(self) -> None:
        self._fitting: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.unmatched: weakref.WeakKeyDictionary[nn.Module, _UnmatchedState] = (
            weakref.WeakKeyDictionary()
        )
        """By module, what the next backward compares, and the next step decides; mostly empty."""

    def add(self, module: nn.Module, tensors: int, fitting: int) -> None:
        """Note what a module was given; any may be the model, or most of it."""
        if fitting > 0:
            self._fitting.add(module)
        else:
            weights = FewWeights(list(nn.Module.parameters(module)))
            self.unmatched[module] = _UnmatchedState(tensors, weights)

    def backward_begins(self) -> None:
        """See whether modules still have the weights that they were left with, once."""
        for each in self.unmatched.values():
            if not each.is_compared:
                each.stays, each.is_compared = each.weights.kept(), True

    def stepped(self, plan: MeasurementPlan | None, scalars: dict[str, Scalar]) -> None:
        """Add to the step the tensors of a state for most of what an optimizer trains."""
        trained = frozenset() if plan is None else plan.identities
        unmatched, self.unmatched = self.unmatched, weakref.WeakKeyDictionary()
        loaded = {id(each) for module in self._fitting for each in nn.Module.parameters(module)}
        for module, state in unmatched.items():
            held = set(map(id, nn.Module.parameters(module)))
            if len(trained & held) > len(trained) / 2 and held.isdisjoint(loaded):
                stays = 1.0 if state.stays is None else state.stays
                scalars[NOTHING_LOADED] = state.tensors * stays


@dataclass(slots=True, eq=False)
class TrackerContext:
    """State and services of one tracker. Everything in here lies below the tracker."""

    registry: OptimizerRegistry
    recorder: StepRecorder
    instruments: Instruments
    phases: PhaseMarks
    traits: ObservedTraits
    connection: RingConnection
    parts: StepParts
    loaders: Loaders
    seeds: Seeds
    targets: TokenTargets
    evaluations: Evaluations
    boundaries: StepBoundaries = field(default_factory=StepBoundaries)
    thread: ThreadProgress = field(default_factory=ThreadProgress)
    """State of the calling thread's own training loop."""
    order: LoopOrder = field(default_factory=LoopOrder)
    trainer_step: TrainerStep = field(default_factory=TrainerStep)
    run_thread: int | None = None
    """Thread in which the first optimizer stepped last, or before its first step, in which its
    gradients were measured; others train their own models."""
    awaits_optimizer: bool = False
    """The ring is made with the first optimizer, or once there have been many backwards."""
    loaded: LoadedStates = field(default_factory=LoadedStates)
    guarded: bool = False
    """The guard is to act on updates."""
    clipping_is_compiled: bool = False
    """Clipping calls no hook, so gradients are measured after every backward instead."""

    @property
    def step(self) -> OpenStep:
        """The step under way."""
        return self.boundaries.step

    @property
    def trains_other_model(self) -> bool:
        """Whether this thread trains something other than the first optimizer's model."""
        return self.run_thread not in (None, get_ident())

    def note_unsupported(self, feature: str) -> None:
        """Report, once, that a feature of the training script is not measured."""
        self.connection.reports.note_unsupported(feature)

    def note_unguarded(self, feature: str) -> None:
        """Report updates on which the guard does not act."""
        self.connection.reports.note_unguarded(feature)

    def enter_phase(self, phase: Phase) -> None:
        """Set the phase of training, unless this thread trains another model."""
        if not self.trains_other_model:
            self.phases.training(phase, self.boundaries.step.sequence)

    def marked_plan(self) -> MeasurementPlan | None:
        """Return the plan of the gradients that should stay as backward leaves them."""
        first = self.registry.first
        return None if first is None or first.managed else first.plan()

    def inverse_scale(self, watched: WatchedOptimizer) -> Scalar:
        """Return 1 / the loss scale by which the gradients are still multiplied."""
        still_scaled = watched.scaled and watched.label not in self.thread.unscaled
        scale = self.note_loss_scale(self.thread.scaler, watched) if still_scaled else None
        return 1.0 if scale is None else reciprocal(scale)

    def note_loss_scale(
        self, scaler: GradScaler | None, watched: WatchedOptimizer
    ) -> Scalar | None:
        """Record the loss scale in force, and return it; `get_scale()` would sync the device."""
        scale = None if scaler is None else self.thread.scale_now.of(scaler._get_scale_async())
        if scale is not None:
            separate = watched.role is Role.SEPARATE
            scalars = watched.scalars if separate else self.boundaries.of(watched).scalars
            scalars["loss_scale"] = scale
        return scale

    def note_learning_rate(self, watched: WatchedOptimizer) -> None:
        """Record the learning rate of the open step, unless it is known already."""
        scalars = self.boundaries.step.scalars
        if "learning_rate" not in scalars and (rate := watched.learning_rate()) is not None:
            scalars["learning_rate"] = rate

    def renew_learning_rate(self, watched: WatchedOptimizer) -> None:
        """Record the learning rate that the run is about to step with, if it was recorded before.

        A script may set it between clipping, which shows the gradients, and the step.
        """
        step = self.boundaries.step
        if watched is not (self.registry.first or watched) or watched.label in step.stepped:
            return
        if step.scalars.get("learning_rate") is not None and not step.rate_observed:
            del step.scalars["learning_rate"]
            self.note_learning_rate(watched)

    def note_trainer_step(self, watched: WatchedOptimizer, sequence: int) -> None:
        """Learn the trainer's number of step `sequence`, the next one of an optimizer."""
        if (optimizer := watched.optimizer) is not None:
            self.trainer_step.inspect(optimizer, sequence)
            self.update_trainer_lead()
            if sequence == STATE_KNOWN_STEP:
                self._note_beginning(watched)

    def note_lost_state(self, watched: WatchedOptimizer) -> None:
        """Record that a new optimizer makes each step, and what the last ones kept is lost."""
        optimizer = watched.optimizer
        if optimizer is not None and (steps := self.trainer_step.lost_steps(optimizer)):
            self.step.scalars[RESUMED_WITHOUT_STATE] = float(steps)

    def _note_beginning(self, watched: WatchedOptimizer) -> None:
        """Record what the first steps show of how the run began."""
        if ahead := self.trainer_step.resumed_without_state:
            self.step.scalars[RESUMED_WITHOUT_STATE] = float(ahead)
        if (behind := self.trainer_step.schedule_behind) > 0:
            self.step.scalars[SCHEDULE_BEHIND] = float(behind)
        model, plan = self.registry.root, watched.plan()
        if not watched.mode.is_known and model is not None and plan is not None:
            watched.mode.given(model, trained_before=False, held=plan.identities)

    def update_trainer_lead(self) -> None:
        """Let records carry the trainer's step number as it is known now, if they can hold it."""
        lead = self.trainer_step.lead
        if abs(lead) <= _LEAD_MAX:
            self.recorder.trainer_lead = lead
        else:
            self.note_unsupported(STEP_TOO_LARGE)
