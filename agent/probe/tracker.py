"""Follows the steps of training from event to event. Each method is told what its name says."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from math import isnan
from threading import get_ident
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mp_agent.probe.optimizers.engine import Engine
from mp_agent.probe.optimizers.live_objects import optimizer_parameters
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.optimizers.run_facts import ObservedTraits
from mp_agent.probe.optimizers.watched import Role, WatchedOptimizer
from mp_agent.probe.placement import world_size
from mp_agent.probe.recorder import StepRecorder
from mp_agent.probe.scalars import Scalar, add, reciprocal, scalar_of
from mp_agent.probe.step.backward_loss import loss_of
from mp_agent.probe.step.boundaries import StepBoundaries
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.step.phases import PhaseMarks
from mp_agent.probe.step.running_step import running_step
from mp_agent.probe.step.thread_progress import ThreadProgress, within_backward
from mp_agent.probe.step.trainer_step import TrainerStep
from mp_agent.records.steps import Phase

_TEARDOWN_PAUSE_SECONDS = 0.1
_UNUSED_GRADIENTS_AT_MOST = 64
"""How often gradients are cleared before any optimizer steps until none is expected to."""


class TrackerCallbacks(NamedTuple):
    """What the follower asks of the probe."""

    connect: Callable[[], None]
    on_step_end: Callable[[], None]
    take_probe_seconds: Callable[[], float]
    note_unsupported: Callable[[str], None]


class StepTracker:
    """Knows how far the step under way has come, and when to look. Implements `hooks.Events`.

    Gradients are looked at by the first of unscaling, clipping and the optimizer's step after the
    last backward; with a closure, when it returns for the first time. A step ends with
    `scaler.step`, without a scaler with `optimizer.step`.
    """

    def __init__(
        self,
        subjects: OptimizerRegistry,
        recorder: StepRecorder,
        phases: PhaseMarks,
        traits: ObservedTraits,
        calls: TrackerCallbacks,
    ) -> None:
        self._subjects = subjects
        self._recorder = recorder
        self._phases = phases
        self._traits = traits
        self._calls = calls
        self._boundaries = StepBoundaries(recorder.publish)
        self._here = ThreadProgress()
        self._first_thread: int | None = None
        """Thread in which the first optimizer stepped last; others train models of their own."""
        self._trainer_step = TrainerStep()
        self._stepped_sequence = 0
        """Step for which the first optimizer was last stepped; a second time, if that broke off."""
        self._stepped_in_backward = False
        self._clips_unseen = False
        self._unused_gradients = 0
        """How often gradients were cleared before any optimizer stepped."""
        self._gradients_change = False
        """The script was found to change gradients in place between backward and step."""
        self._not_training = False

    @property
    def _step(self) -> OpenStep:
        return self._boundaries.step

    def observe(self, loss: object, step: int | None, lr: object, tokens: object) -> None:
        """Take what the trainer says of the step under way; None is nothing said."""
        if (loss_value := scalar_of(loss)) is not None:
            self._step.observe_loss(loss_value)
        if step is not None:
            self._trainer_step.observe(int(step), self._step.sequence)
            self._recorder.trainer_lead = self._trainer_step.lead
        if (rate := scalar_of(lr)) is not None:
            self._step.scalars["learning_rate"] = rate
        if (count := scalar_of(tokens)) is not None:
            self._step.scalars["tokens"] = add(self._step.scalars.get("tokens"), count)

    def flush(self) -> None:
        """Publish what was seen of the step under way."""
        self._subjects.pass_begins()
        self._boundaries.settle()
        self._recorder.flush(self._step)

    def autocast_entered(self, dtype: torch.dtype) -> None:
        """Note the precision."""
        self._traits.autocast_dtype = dtype

    def loss_scaled(self, scaler: GradScaler, outputs: object, scaled: object) -> None:
        """Remember the loss as it was before; the backward that follows sees it scaled."""
        here = self._here
        here.scaler = scaler
        here.unscaled.clear()
        here.scaled_losses.note(outputs, scaled)
        if not self._is_aside():
            self._traits.scaler_name = type(scaler).__name__

    def backward_begins(
        self, roots: object, seeds: object, inputs: Sequence[torch.Tensor] | None
    ) -> None:
        """Take the loss; what was measured so far is outdated."""
        self._calls.connect()
        here = self._here
        here.in_backward = True
        here.closure_made_gradients = here.in_closure
        if not here.in_closure:
            self._end_step_around()
        here.scaler_steps = None  # left over from a step that raised
        aside = self._is_aside()
        if not aside:
            self._phases.training(Phase.BACKWARD, self._step.sequence)
            self._begin_next_pass()
        if inputs is not None and not self._reaches(inputs):
            return
        self._boundaries.gradients_change(here.measures if aside else None)
        if not aside:
            self._begin_pass(roots, seeds)
        here.scaled_losses.clear()

    def backward_ended(self) -> None:
        """Stand before the optimizer, or before the next micro-batch's forward."""
        here = self._here
        here.in_backward = False
        if self._is_aside():
            return
        if (plan := self._marked_plan()) is not None:
            here.gradients.backward_ended(plan)
            if here.gradients.touched:
                self._boundaries.reaches_run = True
        self._phases.training(Phase.FORWARD, self._step.sequence)
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            self._finish_run("")
        elif self._clips_unseen:
            for subject in self._subjects.known:
                self._measure(subject, "backward", self._inverse_scale(subject))

    def gradients_cleared(self, owner: Optimizer | nn.Module) -> None:
        """Tell gradients that are thrown away from those of a first pass, and keep these.

        Where the weights have been changed since backward, though no optimizer has stepped, the
        next backward is taken at other weights and gives no other step (SAM).
        """
        step, first, here = self._step, self._subjects.first, self._here
        if isnan(step.backward_seconds) or self._is_aside() or within_backward():
            return
        if first is None:
            step.note_cleared(owner)
            self._unused_gradients += 1
            if self._unused_gradients == _UNUSED_GRADIENTS_AT_MOST:
                self._calls.note_unsupported("training without an optimizer of torch.optim")
            return
        if not _clears(owner, first):
            return
        if here.weights.moved:
            self._settle(first)
        step.loss_outdated = True

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Look at the gradients, which are as the optimizer will see them."""
        if self._here.engine_steps:
            return
        if (subject := self._subjects.of(optimizer)) is not None:
            subject.scaled = True
            self._note_loss_scale(scaler, subject)
            self._here.unscaled.add(subject.label)
            self._measure(subject, "unscale", 1.0)

    def clipping(self, parameters: list[torch.Tensor]) -> None:
        """Look at the gradients before they are clipped; they may still be scaled."""
        holding = self._subjects.holding(parameters)
        subjects = [subject for subject in holding if not subject.managed]
        for subject in subjects:
            self._measure(subject, "clip", self._inverse_scale(subject))
        self._here.clipped = [
            subject
            for subject in subjects
            if subject.label not in self._boundaries.of(subject).settled
        ]

    def clipping_to(self, max_norm: object, total_norm: object) -> None:
        """Note the limit and the norm of the clipping that was announced."""
        limit, norm = scalar_of(max_norm), scalar_of(total_norm)
        if limit is None or norm is None:
            return
        of_run = [each for each in self._here.clipped if each.role is not Role.APART]
        if of_run:
            step = self._boundaries.of(of_run[0])
            step.add_clipping({each.label for each in of_run}, limit, norm)
        else:
            for subject in self._here.clipped:
                subject.scalars.update(clip_max_norm=limit, clip_norm=norm)

    def clipping_compiled(self) -> None:
        """Look at the gradients after every backward from now on, since clipping will not show."""
        self._clips_unseen = True
        self._calls.note_unsupported("limit and coefficient of clipping, which is compiled")
        self._traits.measuring_point = "backward"

    def scaler_step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Watch whether the optimizer will be stepped."""
        here = self._here
        if here.engine_steps:
            return
        here.scaler_steps = self._subjects.of(optimizer)
        if here.scaler_steps is not None:
            here.scaler_steps.scaled = True
            self._note_loss_scale(scaler, here.scaler_steps)
            here.optimizer_stepped = False

    def scaler_step_ended(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """End the step: skipped, if the optimizer was not stepped."""
        here = self._here
        subject, here.scaler_steps = here.scaler_steps, None
        if subject is not None and subject is self._subjects.of(optimizer):
            if not here.optimizer_stepped:
                self._note_skip(subject, 1.0)
            self._finish(subject)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Remember it: it may train a part of the run's model."""
        self._subjects.made(optimizer)

    def optimizer_step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Look at the gradients if nobody has; of a fused optimizer take the skip flag."""
        here = self._here
        if self._not_training or here.engine_steps:
            here.optimizer_stepped = True
            return
        if within_backward() and not here.in_closure:
            self._step_in_backward(optimizer)
            return
        if here.stepping not in (None, id(optimizer)):
            return  # an optimizer within the optimizer
        if (subject := self._subjects.of(optimizer)) is None or subject.managed:
            return
        if self._is_part_of_step_around(optimizer, subject) or (
            not has_closure and self._subjects.is_outer(optimizer, subject)
        ):
            here.optimizer_stepped = True
            return
        if not subject.label:
            if self._stepped_sequence == self._step.sequence:
                self._recorder.lost_a_step()
            self._stepped_sequence = self._step.sequence
        here.stepping, here.optimizer_stepped = id(optimizer), True
        here.in_closure, here.closure_awaited = False, has_closure
        if not has_closure:
            self._look_before_step(subject, optimizer)

    def closure_begins(self, optimizer: Optimizer) -> None:
        """Expect backwards within the optimizer's step."""
        self._here.in_closure = self._here.stepping == id(optimizer)
        self._here.closure_made_gradients = False

    def closure_returned(self, optimizer: Optimizer) -> None:
        """Look at the gradients when the closure returns for the first time in this step.

        Without a backward in it they are those of the loop, which Lightning steps by hand so.
        """
        here = self._here
        if here.stepping != id(optimizer):
            return
        here.in_closure = False
        subject = self._subjects.of(optimizer)
        if here.closure_awaited and subject is not None:
            here.closure_awaited = False
            if here.closure_made_gradients:
                self._settle(subject)
            else:
                self._look_before_step(subject, optimizer)

    def closure_raised(self, optimizer: Optimizer) -> None:
        """Take the step for given up: the next backward is that of a new try."""
        here = self._here
        if here.stepping != id(optimizer):
            return
        here.in_closure = False
        if (subject := self._subjects.of(optimizer)) is not None:
            settled = self._boundaries.of(subject).settled
            settled.difference_update(each.label for each in self._subjects.together(subject))
            self._step.loss_outdated |= subject.of_run
            if not subject.label:
                self._stepped_sequence = 0
            here.weights.forget()

    def optimizer_step_ended(self, optimizer: Optimizer) -> None:
        """End the step, unless the scaler will."""
        here = self._here
        if here.around is not None and here.around[0] == id(optimizer):
            here.around = None
            here.weights.forget()
            if not self._is_aside():
                self._step.loss_outdated = self._step.losses > 0
        if here.stepping != id(optimizer):
            return
        here.stepping, here.in_closure = None, False
        subject = self._subjects.of(optimizer)
        if subject is None:
            return
        if here.closure_awaited:  # it was never called
            here.closure_awaited = False
            self._look_before_step(subject, optimizer)
        if subject is not here.scaler_steps:
            subject.scaled = False
            self._finish(subject)

    def scheduler_stepped(self, scheduler: LRScheduler) -> None:
        """Learn the trainer's number of the step before."""
        first = self._subjects.first
        if first is not None and first.is_of(scheduler.optimizer):
            self._trainer_step.scheduler_stepped(scheduler.last_epoch, self._step.sequence - 1)
            self._recorder.trainer_lead = self._trainer_step.lead

    def not_training(self, stepping: bool) -> None:
        """Count no optimizer's step while `stepping`: torch makes it, to fill in empty state."""
        self._not_training = stepping

    def engine_made(self, engine: Engine) -> None:
        """Leave an optimizer to the engine that steps it."""
        self._subjects.managed_by(engine)

    def engine_backward_begins(self, loss: Scalar) -> None:
        """Take the loss before the engine scales it; the backward that follows sees it scaled."""
        self._here.announced_loss = loss

    def engine_scaled(self, loss: Scalar, scaled: object) -> None:
        """Remember the loss as it was before."""
        self._here.scaled_losses.note(loss, scaled)

    def loss_divided(self, parts: int) -> None:
        """Count the loss of the backward under way for one of `parts`, as its gradients do."""
        if not self._is_aside():
            self._step.divide_last_loss(parts)

    def engine_step_begins(self, engine: Engine) -> None:
        """Look at the gradients before the engine unscales and clips them."""
        here = self._here
        if (subject := self._subjects.managed_by(engine)) is None:
            return
        here.engine_steps, here.optimizer_stepped = True, False
        before = engine.begin()
        if subject.of_run:
            if before.loss_scale is not None:
                self._step.scalars["loss_scale"] = before.loss_scale
                self._traits.scaler_name = engine.scaler_name
            if before.completed is not None:
                self._trainer_step.take(before.completed, self._step.sequence)
                self._recorder.trainer_lead = self._trainer_step.lead
        scale = before.gradient_scale
        self._measure(subject, "engine_step", 1.0 if scale is None else reciprocal(scale))

    def engine_step_raised(self) -> None:
        """Take the step for given up."""
        self._here.engine_steps = False

    def engine_step_ended(self, engine: Engine) -> None:
        """End the step with what the engine made of it."""
        here = self._here
        if not here.engine_steps:
            return
        here.engine_steps = False
        if (subject := self._subjects.managed_by(engine)) is None:
            return
        result = engine.end()
        skipped = not here.optimizer_stepped if result.skipped is None else result.skipped
        step = self._boundaries.of(subject)
        if not subject.of_run:
            step.forget_if(float(skipped), subject.label)
        else:
            step.scalars["skipped"] = float(skipped)
            own = step.norm(subject.label)
            if result.clip_max_norm is not None and own is not None and not skipped:
                norm = own if result.norm is None else result.norm
                step.scalars.update(clip_max_norm=result.clip_max_norm, clip_norm=norm)
        self._finish(subject)

    @property
    def between_steps(self) -> bool:
        """Whether training has begun and stands between an optimizer's step and a backward."""
        return self._phases.between_steps

    def mode_changed(self, module: nn.Module, training: bool) -> None:
        """Take the evaluation mode of the model that is trained for evaluation."""
        first = self._subjects.first
        plan = None if first is None else first.plan()
        if plan is None or self._is_aside():
            return
        if plan.identities <= {id(each) for each in nn.Module.parameters(module)}:
            self._phases.evaluation("mode", not training)

    def evaluation(self, sign: str, begins: bool) -> None:
        """Take a stretch without gradients, between two steps, for evaluation."""
        if not self._is_aside():
            self._phases.evaluation(sign, begins)

    def saving(self, begins: bool) -> None:
        """Note that a checkpoint is being written, by the thread that trains."""
        if not self._is_aside():
            self._phases.saving(begins)

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Give gloo's threads time to let go of the work of DDP's last backward.

        The group's destructor waits for them with the GIL held, which they need for that (torch
        2.13): now and then both wait for ever.
        """
        reduced = self._traits.reduced_by_ddp and dist.is_initialized()
        if reduced and "gloo" in dist.get_backend(group):
            time.sleep(_TEARDOWN_PAUSE_SECONDS)

    def _is_aside(self) -> bool:
        """Return whether this thread trains something else than the first optimizer's model."""
        return self._first_thread not in (None, get_ident())

    def _reaches(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether any of these may be one of the first optimizer's parameters."""
        plans = self._subjects.plans_of_run()
        return not plans or any(plan.holds(each) for plan in plans for each in inputs)

    def _end_step_around(self) -> None:
        """End the step that runs a backward, by a hook of the script's or of its own accord.

        What follows within it may be whole steps of other optimizers. A step that is no longer
        running has raised, and was none.
        """
        here = self._here
        identity, here.stepping = here.stepping, None
        if identity is None or here.closure_awaited:
            return
        if (optimizer := running_step(identity)) is None:
            return
        subject = self._subjects.of(optimizer)
        if subject is None or not self._subjects.has_new_gradients(subject):
            return  # it makes the gradients that it will use by itself
        if subject is not here.scaler_steps:
            subject.scaled = False
        here.around = identity, subject
        self._finish(subject)

    def _is_part_of_step_around(self, optimizer: Optimizer, subject: WatchedOptimizer) -> bool:
        """Return whether a step within another one, which has been counted, updates the same.

        The other one may have raised; the same optimizer then begins a step of its own.
        """
        here = self._here
        if here.around is None:
            return False
        if here.around[0] == id(optimizer) or running_step(here.around[0]) is None:
            here.around = None
            return False
        return here.around[1] is subject

    def _begin_next_pass(self) -> None:
        """Publish the step before with what the pass that is over has shown of its optimizers."""
        if self._subjects.pass_begins():
            self._boundaries.settle()
        self._boundaries.pass_begins()

    def _begin_pass(self, roots: object, seeds: object) -> None:
        here, step = self._here, self._step
        step.backward_seconds = perf_counter()
        first = self._subjects.first
        if not here.in_closure and first is not None and (plan := first.plan()) is not None:
            here.weights.set(plan)
        if (plan := self._marked_plan()) is not None:
            here.gradients.backward_begins(plan)
        scale = None if here.scaler is None else scalar_of(here.scaler._get_scale_async())
        inverse_scale = 1.0 if scale is None else reciprocal(scale)
        loss, here.announced_loss = here.announced_loss, None
        if loss is None:
            loss = loss_of(roots, seeds, here.scaled_losses, inverse_scale)
        if loss is not None:
            step.add_loss(loss)

    def _marked_plan(self) -> MeasurementPlan | None:
        """Return the plan of the gradients that should stay as backward leaves them."""
        first = self._subjects.first
        return None if first is None or first.managed else first.plan()

    def _note_changed_gradients(self, point: str) -> None:
        """Say so where gradients were clipped, or otherwise changed, by means that no hook sees.

        On several ranks the change may be the script's own reduction, which is no reason for it.
        """
        looks_late = point in ("clip", "optimizer_step") and world_size() == 1
        if looks_late and not self._gradients_change and self._here.gradients.moved:
            self._gradients_change = True
            self._calls.note_unsupported("gradients before the script itself changed them")
        self._here.gradients.forget()  # what changes them from now on is announced by a hook

    def _inverse_scale(self, subject: WatchedOptimizer) -> Scalar:
        """Return 1 / the scale that the gradients still carry."""
        still_scaled = subject.scaled and subject.label not in self._here.unscaled
        scale = self._note_loss_scale(self._here.scaler, subject) if still_scaled else None
        return 1.0 if scale is None else reciprocal(scale)

    def _settle(self, subject: WatchedOptimizer) -> None:
        """Look at gradients after which others will follow, that were taken at other weights."""
        self._measure(subject, "optimizer_step", self._inverse_scale(subject))
        settled = self._boundaries.of(subject).settled
        settled.update(each.label for each in self._subjects.together(subject))

    def _look_before_step(self, subject: WatchedOptimizer, optimizer: Optimizer) -> None:
        # GradScaler leaves these two to optimizers that unscale, and skip, by themselves.
        scale = scalar_of(getattr(optimizer, "grad_scale", None))
        skipped = scalar_of(getattr(optimizer, "found_inf", None))
        if not self._clips_unseen:
            self._measure(subject, "optimizer_step", 1.0 if scale is None else reciprocal(scale))
        elif isnan(self._boundaries.of(subject).backward_seconds):
            self._calls.note_unsupported("the norm before clipping, which is compiled")
            self._measure(subject, "after_clipping", 1.0 if scale is None else reciprocal(scale))
        if skipped is not None:
            self._note_skip(subject, skipped)

    def _measure(self, subject: WatchedOptimizer, point: str, inverse_scale: Scalar) -> None:
        if not self._is_aside():
            self._phases.training(Phase.OPTIMIZER, self._step.sequence)
        self._subjects.confirm(subject)
        if subject.role is Role.APART and self._is_overtaken_by(subject):
            self._hand_over(subject)
        step = self._boundaries.of(subject)
        if subject.label in step.measured or subject.label in step.settled:
            return
        if self._boundaries.is_published(step):
            step = self._step
        self._calls.connect()
        if subject.of_run and step is self._step:
            self._boundaries.settle()
            first = self._subjects.first or subject
            step.drop_cleared_loss(lambda owner: _clears(owner, first))
            self._note_learning_rate(first)
            if not first.managed:
                self._note_trainer_step(first, self._step.sequence)
        looks = [
            (each, inverse_scale if each is subject else self._inverse_scale(each))
            for each in self._subjects.together(subject)
        ]
        self._here.measures.update(each.label for each, _ in looks)
        if subject.of_run:
            self._note_changed_gradients(point)
        self._recorder.measure(step, looks, point)

    def _is_overtaken_by(self, subject: WatchedOptimizer) -> bool:
        """Return whether an optimizer trains on where those of the run have ceased to.

        Trainings side by side, each in a thread of its own, do not take each other's place.
        """
        returns = self._subjects.returns(subject)
        overtaken = returns or self._boundaries.is_overtaken_by(
            subject.label, lambda: self._subjects.trains_the_model(subject)
        )
        if not overtaken:
            return False
        return not self._is_aside() or all(
            thread.ident != self._first_thread for thread in threading.enumerate()
        )

    def _hand_over(self, subject: WatchedOptimizer) -> None:
        """Let the steps of an optimizer be the run's: those that made them have ceased to."""
        label = subject.label
        if self._subjects.returns(subject):
            self._boundaries.take_turns()
        labels = self._subjects.take_over(subject)
        self._first_thread = get_ident()
        self._boundaries.settle()  # numbered as the optimizer before has it
        made_one = self._boundaries.has_lone_step(label)
        self._note_trainer_step(subject, self._step.sequence + made_one)
        if self._boundaries.be_taken_over(label, labels):
            self._calls.on_step_end()

    def _note_learning_rate(self, subject: WatchedOptimizer) -> None:
        if (rate := scalar_of(subject.learning_rate())) is not None:
            self._step.scalars.setdefault("learning_rate", rate)

    def _note_trainer_step(self, subject: WatchedOptimizer, sequence: int) -> None:
        """Learn the trainer's number of step `sequence`, the next of an optimizer."""
        if (optimizer := subject.optimizer) is not None:
            self._trainer_step.look(optimizer, sequence)
            self._recorder.trainer_lead = self._trainer_step.lead

    def _note_skip(self, subject: WatchedOptimizer, skipped: Scalar) -> None:
        """Note that a scaler left a step out: of any part of the run's model it is the run's."""
        subject.scalars["skipped"] = skipped
        step = self._boundaries.of(subject)
        if subject.of_run:
            step.scalars["skipped"] = add(step.scalars.get("skipped"), skipped)
        else:
            step.forget_if(skipped, subject.label)

    def _note_loss_scale(
        self, scaler: GradScaler | None, subject: WatchedOptimizer
    ) -> Scalar | None:
        """Note the scale in force, and return it; `get_scale()` would wait for the device."""
        scale = None if scaler is None else scalar_of(scaler._get_scale_async())
        if scale is not None:
            apart = subject.role is Role.APART
            scalars = subject.scalars if apart else self._boundaries.of(subject).scalars
            scalars["loss_scale"] = scale
        return scale

    def _step_in_backward(self, optimizer: Optimizer) -> None:
        """Count the backward for a step: there is no moment at which all gradients exist."""
        self._calls.note_unsupported("optimizer step within backward")
        self._stepped_in_backward = True
        subject = self._subjects.first or self._subjects.of(optimizer)
        if subject is not None:
            self._note_learning_rate(subject)

    def _finish(self, subject: WatchedOptimizer) -> None:
        self._here.unscaled.add(subject.label)
        self._subjects.confirm(subject)
        ends_step = self._boundaries.of(subject) is self._step
        awaited = self._subjects.awaited
        self._subjects.stepped(subject)
        if not subject.of_run:
            if (rate := scalar_of(subject.learning_rate())) is not None:
                subject.scalars["learning_rate"] = rate
            self._boundaries.other_ended(subject)
        elif ends_step:
            self._finish_run(subject.label, awaited)
        else:
            self._boundaries.joint_ended(subject.label)
        subject.scalars.clear()

    def _finish_run(self, label: str, awaited: Collection[str] = ()) -> None:
        """End the step under way: the optimizer `label` of the run has stepped."""
        self._first_thread = get_ident()
        self._here.weights.forget()
        self._step.scalars.setdefault("skipped", 0.0)
        self._recorder.end(self._step, self._calls.take_probe_seconds())
        self._boundaries.run_ended(label, awaited)
        self._phases.training(Phase.FORWARD, self._step.sequence)
        self._calls.on_step_end()


def _clears(owner: Optimizer | nn.Module, subject: WatchedOptimizer) -> bool:
    """Return whether gradients of `subject` are among those that `owner` clears."""
    if isinstance(owner, Optimizer):
        parameters = optimizer_parameters(owner)
    else:
        parameters = nn.Module.parameters(owner)
    trained = next((each for each in parameters if each.requires_grad), None)
    plan = subject.plan()
    return trained is not None and plan is not None and plan.holds(trained)
