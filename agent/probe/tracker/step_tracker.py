"""Receives the events of the hooks, and passes each on to the module of its subject."""

import time
import weakref
from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mp_agent.probe.isolation import Shield
from mp_agent.probe.optimizers.engine import Engine, OwningEngine
from mp_agent.probe.optimizers.parameter_names import holds_any, optimizer_parameters
from mp_agent.probe.optimizers.roles import Role
from mp_agent.probe.scalars import Scalar, add, reciprocal, scalar_of, snapshot_of
from mp_agent.probe.tracker.backward import BackwardTracking, LossTracking
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.measuring import (
    ClippingTracking,
    GradientMeasuring,
    LossScalingTracking,
    StepEnd,
    Succession,
)
from mp_agent.probe.tracker.optimizer_steps import UNGUARDED, GraphSteps, OptimizerSteps
from mp_agent.records.steps import NEVER_STEPPED


class ActivityTracking:
    """Sets the phase between an optimizer's step and the next backward."""

    def __init__(self, context: TrackerContext) -> None:
        self._context = context

    @property
    def between_steps(self) -> bool:
        """Whether training has begun and neither a backward nor an optimizer is running."""
        return self._context.phases.between_steps

    def mode_changed(self, module: nn.Module, training: bool, before: bool) -> None:
        """Treat the evaluation mode of the model that is trained as evaluation."""
        context = self._context
        if context.trains_other_model or context.registry.first is None:
            return
        held = {id(each) for each in nn.Module.parameters(module)}
        for watched in context.registry.known:
            if (plan := watched.plan()) is None or not plan.identities <= held:
                continue
            trained = before and watched.stepped_in_pass > 0
            watched.mode.given(module, trained_before=trained, held=plan.identities)
            if watched.role is not Role.FIRST:
                continue
            evaluated = weakref.ref(module)

            def is_over(
                evaluated: weakref.ref[nn.Module] = evaluated,
            ) -> bool:  # Lightning sets the attribute, and calls nothing
                found = evaluated()
                return found is None or found.training

            context.phases.evaluation("mode", not training, is_over)

    def evaluation(self, sign: str, begins: bool) -> None:
        """Treat a stretch without gradients, between two steps, as evaluation."""
        context = self._context
        if not context.trains_other_model:
            context.phases.evaluation(sign, begins)
            if begins:
                context.evaluations.begin_evaluation()

    def random_numbers_set(self, seeded: bool) -> None:
        """Note that the thread that trains has set the seed, or the state, of random numbers."""
        if not self._context.trains_other_model:
            self._context.seeds.numbers_set(seeded=seeded)

    def saving(self, begins: bool) -> None:
        """Enter or leave the checkpoint phase, if the thread that trains saves."""
        if not self._context.trains_other_model:
            self._context.phases.saving(begins)


class EngineSteps:
    """Measures before an engine steps, and records what became of the step."""

    def __init__(
        self, context: TrackerContext, measuring: GradientMeasuring, step_end: StepEnd
    ) -> None:
        self._context = context
        self._measuring = measuring
        self._step_end = step_end

    def begins(self, engine: Engine) -> None:
        """Measure the gradients before the engine unscales and clips them."""
        context, thread = self._context, self._context.thread
        if (watched := context.registry.managed_by(engine)) is None:
            if engine.optimizer is None:
                context.note_unsupported("an engine without parameters to train on this rank")
            return
        early = context.step.sequence <= 2  # attached late, or the first one's are used again
        explained = watched.use.engine_begins() or early
        if watched.of_run and isnan(context.step.backward_seconds) and not explained:
            context.note_unsupported("the loss of backwards that an engine runs by other means")
        if context.guarded and not isinstance(engine, OwningEngine):
            context.note_unguarded(UNGUARDED)
        thread.engine_steps, thread.optimizer_stepped = True, False
        before = engine.begin()
        if watched.of_run:
            if before.loss_scale is not None:
                context.step.scalars["loss_scale"] = before.loss_scale
                context.traits.scaler_name = engine.scaler_name
            if before.completed is None:
                context.note_trainer_step(watched, context.step.sequence)
            else:
                context.trainer_step.completed_by_engine(before.completed, context.step.sequence)
                context.update_trainer_lead()
        scale = before.gradient_scale
        inverse_scale = 1.0 if scale is None else reciprocal(scale)
        if watched.of_run and scale is not None:
            context.step.unscale_raw_loss(inverse_scale)
        self._measuring.measure(watched, "engine_step", inverse_scale)

    def raised(self) -> None:
        """Give the step up."""
        self._context.thread.engine_steps = False

    def ended(self, engine: Engine) -> None:
        """End the step with its outcome: skipped or not, and how it was clipped."""
        context, thread = self._context, self._context.thread
        if not thread.engine_steps:
            return
        thread.engine_steps = False
        if (watched := context.registry.managed_by(engine)) is None:
            return
        result = engine.end()
        skipped = not thread.optimizer_stepped if result.skipped is None else result.skipped
        step = context.boundaries.of(watched)
        if not watched.of_run:
            step.forget_if(float(skipped), watched.label)
        else:
            step.scalars["skipped"] = float(skipped)
            own = step.norm(watched.label)
            if result.clip_max_norm is not None and own is not None and not skipped:
                norm = own if result.norm is None else result.norm
                step.scalars.update(clip_max_norm=result.clip_max_norm, clip_norm=norm)
        self._step_end.finish(watched)


_TEARDOWN_PAUSE_SECONDS = 0.1

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
STEP_ON_DEVICE = "observe(step=…) of a tensor on a GPU"
UNREADABLE = "observe({}=…) of what cannot be read as one number"


class StepTracker:
    """Knows how far the step under way has come, and when to measure. Implements `hooks.Events`.

    Most events are methods of the part that handles them; the others concern several parts.

    Gradients are measured at the first of unscaling, clipping and the optimizer's step after the
    last backward; with a closure, when it returns for the first time. A step ends with
    `scaler.step`, without a scaler with `optimizer.step`.
    """

    def __init__(
        self, context: TrackerContext, shield: Shield, on_step: Callable[[], None]
    ) -> None:
        self._context = context
        self._step_end = step_end = StepEnd(context, shield, on_step)
        measuring = GradientMeasuring(context, Succession(context, step_end), step_end)
        self._graphs = graphs = GraphSteps(context, step_end)
        self._losses = losses = LossTracking(context)
        self._optimizers = optimizers = OptimizerSteps(context, measuring, step_end, graphs)
        self._backward = backward = BackwardTracking(
            context, losses, measuring, optimizers, step_end
        )
        self._activity = activity = ActivityTracking(context)
        loss_scaling = LossScalingTracking(context, measuring, step_end)
        clipping = ClippingTracking(context, measuring)
        engines = EngineSteps(context, measuring, step_end)
        self.unsupported = context.note_unsupported
        self.engine_backward_begins = losses.announced_by_engine
        self.engine_scaled = losses.scaled_by_engine
        self.loss_divided = losses.divided
        self.gradients_multiplied = losses.multiplied
        self.schedule_runs = losses.schedule_runs
        self.schedule_ended = losses.schedule_ended
        self.backward_ended = backward.ended
        self.gradients_cleared = backward.gradients_cleared
        self.gradients_kept = backward.gradients_kept
        self.micro_batch_begins = backward.micro_batch_begins
        self.unscaled = loss_scaling.unscaled
        self.scaler_step_begins = loss_scaling.step_begins
        self.scaler_step_ended = loss_scaling.step_ended
        self.scaler_lets_step = loss_scaling.lets_step
        self.clipping = clipping.begins
        self.clipping_to = clipping.norm_known
        self.clipping_compiled = clipping.compiled
        self.optimizer_step_begins = optimizers.begins
        self.optimizer_step_ended = optimizers.ended
        self.closure_begins = optimizers.closure_begins
        self.closure_returned = optimizers.closure_returned
        self.closure_raised = optimizers.closure_raised
        self.engine_step_begins = engines.begins
        self.engine_step_raised = engines.raised
        self.engine_step_ended = engines.ended
        self.mode_changed = activity.mode_changed
        self.batch_loads = context.loaders.loads
        self.random_numbers_set = activity.random_numbers_set
        self.graph_capture_begins = graphs.capture_begins
        self.graph_capture_ended = graphs.capture_ended
        self.graph_replayed = graphs.replayed

    def observe(self, loss: object, step: object, lr: object, tokens: object) -> None:
        """Use what the trainer reports of the step under way; None is nothing reported."""
        context = self._context
        context.recorder.collect()
        if (loss_value := self._reported("loss", loss)) is not None:
            context.step.observe_loss(loss_value)
        self._observe_step(step)
        if (rate := self._reported("lr", lr)) is not None:
            context.step.scalars["learning_rate"], context.step.rate_observed = rate, True
        if (count := self._reported("tokens", tokens)) is not None:
            context.step.scalars["tokens"] = add(context.step.scalars.get("tokens"), count)

    def _observe_step(self, step: Any) -> None:
        """Use the trainer's number, where that neither waits for a device nor is a collective."""
        context = self._context
        if isinstance(step, torch.Tensor):
            step = self._reported("step", step, scalar_of)
        if isinstance(step, torch.Tensor):
            context.note_unsupported(STEP_ON_DEVICE)
        elif step is not None:
            try:
                number = int(step)
            except (ArithmeticError, TypeError, ValueError):
                context.note_unsupported(UNREADABLE.format("step"))
                return
            self._graphs.observed(number)
            context.trainer_step.observe(number, context.step.sequence)
            context.update_trainer_lead()

    def _reported(
        self, name: str, value: object, read: Callable[[object], Scalar | None] = snapshot_of
    ) -> Scalar | None:
        """Return a number that the trainer reports; of what is none, None, and name it."""
        try:
            number = read(value)
        except (NotImplementedError, OverflowError):  # of nested tensors, of huge integers
            number = None
        if number is None and value is not None:
            self._context.note_unsupported(UNREADABLE.format(name))
        return number

    def collect(self) -> None:
        """Publish what has come from a device since the last event."""
        self._context.recorder.collect()

    def flush(self) -> None:
        """Publish what was observed of the step under way."""
        try:
            self._graphs.end_replayed()
        finally:  # what has come from a device is there, whatever else fails
            self._step_end.flush()

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Remember a new optimizer: it may train a part of the run's model."""
        self._context.registry.made(optimizer)

    def state_loaded(self, module: nn.Module, tensors: int, fitting: int) -> None:
        """Note what a module was given; what the run trains goes on from there."""
        context = self._context
        context.loaded.add(module, tensors, fitting)
        first = context.registry.first
        optimizer = None if first is None else first.optimizer
        if optimizer is not None and holds_any(module, optimizer_parameters(optimizer)):
            context.loaders.weights_loaded()

    def engine_made(self, engine: Engine) -> None:
        """Leave an optimizer to the engine that steps it."""
        self._context.registry.managed_by(engine)

    def engine_never_steps(self) -> None:
        """Report gradients that nothing uses, unless the engine's optimizer is stepped by hand."""
        if not self._optimizers.engine_bypassed:
            self._context.note_unsupported(NEVER_STEPPED)

    def not_training(self, stepping: bool) -> None:
        """Count no optimizer's step while `stepping`: torch makes it, to fill in empty state."""
        self._optimizers.paused = stepping

    def autocast_entered(self, dtype: torch.dtype, with_gradients: bool) -> None:
        """Record the precision, and that autocast is on in this step, for training."""
        self._context.traits.autocast_dtype = dtype
        if with_gradients and dtype in _SIXTEEN_BITS:
            self._context.thread.autocast_step = self._context.step.sequence

    def loss_scaled(self, scaler: GradScaler, outputs: object, scaled: object) -> None:
        """See `LossTracking.scaled`."""
        self._context.recorder.collect()
        self._losses.scaled(scaler, outputs, scaled)

    def backward_begins(
        self, roots: object, seeds: object, inputs: Sequence[torch.Tensor] | None
    ) -> None:
        """See `BackwardTracking.begins`."""
        self._graphs.end_replayed()
        self._context.recorder.collect()
        self._backward.begins(roots, seeds, inputs)

    def reduction_begins(self, gradients: Sequence[torch.Tensor]) -> None:
        """Measure the rank's own gradients, unless another model's are being reduced."""
        if not self._context.trains_other_model:
            self._context.instruments.reduction_begins(gradients)

    def scheduler_stepped(self, scheduler: LRScheduler) -> None:
        """Learn the trainer's number of the step before."""
        context = self._context
        first = context.registry.first
        if first is not None and first.is_of(scheduler.optimizer):
            sequence = context.step.sequence - 1
            context.trainer_step.scheduler_stepped(scheduler.last_epoch, sequence)
            context.update_trainer_lead()

    @property
    def between_steps(self) -> bool:
        """See `ActivityTracking.between_steps`."""
        return self._activity.between_steps

    def evaluation(self, sign: str, begins: bool) -> None:
        """See `ActivityTracking.evaluation`."""
        self._context.recorder.collect()
        self._activity.evaluation(sign, begins)

    def saving(self, begins: bool) -> None:
        """See `ActivityTracking.saving`."""
        self._context.recorder.collect()
        self._activity.saving(begins)

    def scripting(self) -> None:
        """Leave modules and functions as they were: what stands in for them cannot be compiled."""
        self._context.recorder.close()

    def captured(self, event: Callable[..., None], arguments: Sequence[object]) -> None:
        """Note what happens while a CUDA graph is captured, when no event is handled."""
        if event == self.optimizer_step_begins:
            self._graphs.captured_step(arguments[0])
        elif event == self.backward_ended:
            self._graphs.captured_backward()

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Give gloo's threads time to release the work of DDP's last backward.

        The group's destructor waits for them with the GIL held, which they need for that (torch
        2.13): occasionally both wait forever.
        """
        reduced = self._context.traits.reduced_by_ddp and dist.is_initialized()
        if reduced and "gloo" in dist.get_backend(group):
            time.sleep(_TEARDOWN_PAUSE_SECONDS)
