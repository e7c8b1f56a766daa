"""Follows the steps of training from event to event. Each method is told what its name says."""

import time
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.probe.course import Course
from mp_agent.probe.facts import Traits
from mp_agent.probe.phases import PhaseMarks
from mp_agent.probe.recorder import Recorder
from mp_agent.probe.scalars import Scalar, add, reciprocal, scalar_of
from mp_agent.probe.step import OpenStep
from mp_agent.probe.subject import Subject
from mp_agent.probe.subjects import Subjects
from mp_agent.records.steps import Phase

_TEARDOWN_PAUSE_SECONDS = 0.1


class Calls(NamedTuple):
    """What the follower asks of the probe."""

    connect: Callable[[], None]
    on_step_end: Callable[[], None]
    take_probe_seconds: Callable[[], float]
    note_unsupported: Callable[[str], None]


class StepFollower:
    """Knows how far the step under way has come, and when to look. Implements `hooks.Events`.

    Gradients are looked at by the first of unscaling, clipping and the optimizer's step after the
    last backward. A step ends with `scaler.step`, without a scaler with `optimizer.step`.
    """

    def __init__(
        self,
        subjects: Subjects,
        recorder: Recorder,
        phases: PhaseMarks,
        traits: Traits,
        calls: Calls,
    ) -> None:
        self._subjects = subjects
        self._recorder = recorder
        self._phases = phases
        self._traits = traits
        self._calls = calls
        self._course = Course(recorder.publish)
        self._scaler: GradScaler | None = None
        """Has scaled a loss, and not unscaled the gradients of all but these optimizers."""
        self._unscaled: set[str] = set()
        self._loss_counted = False
        self._clipping_first = False
        self._scaler_steps: Subject | None = None
        self._stepping: int | None = None
        """`id` of the outermost optimizer within whose step we are."""
        self._in_closure = False
        self._optimizer_stepped = False
        self._in_backward = False
        self._stepped_in_backward = False

    @property
    def _step(self) -> OpenStep:
        return self._course.step

    def observe(self, loss: object, step: int | None, lr: object, tokens: object) -> None:
        """Take what the trainer says of the step under way; None is nothing said."""
        if (loss_value := scalar_of(loss)) is not None:
            self._step.observe_loss(loss_value)
        if step is not None:
            self._recorder.trainer_lead = int(step) - self._step.sequence
        if (rate := scalar_of(lr)) is not None:
            self._step.scalars["learning_rate"] = rate
        if (count := scalar_of(tokens)) is not None:
            self._step.scalars["tokens"] = add(self._step.scalars.get("tokens"), count)

    def flush(self) -> None:
        """Publish what was seen of the step under way."""
        self._course.settle()
        self._recorder.flush(self._step)

    def autocast_entered(self, dtype: torch.dtype) -> None:
        """Note the precision."""
        self._traits.autocast_dtype = dtype

    def loss_scaled(self, scaler: GradScaler, outputs: object) -> None:
        """Take the loss before it is scaled; the backward that follows sees it scaled."""
        self._scaler = scaler
        self._unscaled.clear()
        self._traits.scaler_name = type(scaler).__name__
        if (loss := scalar_of(outputs)) is not None:
            self._step.add_loss(loss)
            self._loss_counted = True

    def backward_begins(self, tensors: object, gradients: object) -> None:
        """Take the loss, unless a scaler had it; what was measured so far is outdated."""
        self._calls.connect()
        self._course.gradients_change()
        self._step.backward_seconds = perf_counter()
        self._in_backward = True
        self._scaler_steps = None  # left over from a step that raised
        if not self._in_closure:
            self._stepping = None
        self._phases.training(Phase.BACKWARD, self._step.sequence)
        loss = scalar_of(_only(tensors)) if _only(gradients) is None else None
        if loss is not None and not self._loss_counted:
            self._step.add_loss(loss)
        self._loss_counted = False

    def backward_ended(self) -> None:
        """Stand before the optimizer, or before the next micro-batch's forward."""
        self._in_backward = False
        self._phases.training(Phase.FORWARD, self._step.sequence)
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            self._finish_first()

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Look at the gradients, which are as the optimizer will see them."""
        if (subject := self._subjects.of(optimizer)) is not None:
            subject.scaled = True
            self._note_loss_scale(scaler, subject)
            self._unscaled.add(subject.label)
            self._measure(subject, "unscale", 1.0)

    def clipping(self, parameters: list[torch.Tensor]) -> None:
        """Look at the gradients before they are clipped; they may still be scaled."""
        subjects = self._subjects.holding(parameters)
        self._clipping_first = any(not subject.label for subject in subjects)
        for subject in subjects:
            still_scaled = subject.scaled and subject.label not in self._unscaled
            scale = self._note_loss_scale(self._scaler, subject) if still_scaled else None
            self._measure(subject, "clip", 1.0 if scale is None else reciprocal(scale))

    def clipping_to(self, max_norm: object, total_norm: object) -> None:
        """Note the limit and the norm of the clipping that was announced."""
        limit, norm = scalar_of(max_norm), scalar_of(total_norm)
        if self._clipping_first and limit is not None and norm is not None:
            self._step.scalars.update(clip_max_norm=limit, clip_norm=norm)

    def scaler_step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Watch whether the optimizer will be stepped."""
        self._scaler_steps = self._subjects.of(optimizer)
        if self._scaler_steps is not None:
            self._scaler_steps.scaled = True
            self._note_loss_scale(scaler, self._scaler_steps)
            self._optimizer_stepped = False

    def scaler_step_ended(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """End the step: skipped, if the optimizer was not stepped."""
        subject, self._scaler_steps = self._scaler_steps, None
        if subject is not None and subject is self._subjects.of(optimizer):
            if not self._optimizer_stepped and not subject.label:
                self._step.scalars["skipped"] = 1.0
            elif not self._optimizer_stepped:
                self._course.of(subject.label).forget_if(1.0, subject.label)
            self._finish(subject)

    def optimizer_step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Look at the gradients if nobody has; of a fused optimizer take the skip flag."""
        if self._in_backward and not self._in_closure:
            self._step_in_backward(optimizer)
            return
        if self._stepping not in (None, id(optimizer)):
            return  # an optimizer within the optimizer
        if (subject := self._subjects.of(optimizer)) is None:
            return
        self._stepping, self._in_closure, self._optimizer_stepped = id(optimizer), has_closure, True
        if has_closure:
            self._calls.note_unsupported("optimizer step with a closure")
            return
        # GradScaler leaves these two to optimizers that unscale, and skip, by themselves.
        scale = scalar_of(getattr(optimizer, "grad_scale", None))
        skipped = scalar_of(getattr(optimizer, "found_inf", None))
        if skipped is not None and not subject.label:
            self._step.scalars["skipped"] = skipped
        self._measure(subject, "optimizer_step", 1.0 if scale is None else reciprocal(scale))
        if skipped is not None and subject.label:
            self._course.of(subject.label).forget_if(skipped, subject.label)

    def optimizer_step_ended(self, optimizer: Optimizer) -> None:
        """End the step, unless the scaler will."""
        if self._stepping == id(optimizer):
            self._stepping, self._in_closure = None, False
            subject = self._subjects.of(optimizer)
            if subject is not None and subject is not self._scaler_steps:
                subject.scaled = False
                self._finish(subject)

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Give gloo's threads time to let go of the work of DDP's last backward.

        The group's destructor waits for them with the GIL held, which they need for that (torch
        2.13): now and then both wait for ever.
        """
        reduced = self._traits.reduced_by_ddp and dist.is_initialized()
        if reduced and "gloo" in dist.get_backend(group):
            time.sleep(_TEARDOWN_PAUSE_SECONDS)

    def _measure(self, subject: Subject, point: str, inverse_scale: Scalar) -> None:
        self._phases.training(Phase.OPTIMIZER, self._step.sequence)
        step = self._course.of(subject.label)
        if subject.label in step.measured:
            return
        self._calls.connect()
        if not subject.label:
            self._course.settle()
            self._note_learning_rate(subject)
        self._recorder.measure(step, subject, point, inverse_scale)

    def _note_learning_rate(self, subject: Subject) -> None:
        if (rate := scalar_of(subject.learning_rate())) is not None:
            self._step.scalars.setdefault("learning_rate", rate)

    def _note_loss_scale(self, scaler: GradScaler | None, subject: Subject) -> Scalar | None:
        """Note the scale in force, and return it; `get_scale()` would wait for the device."""
        scale = None if scaler is None else scalar_of(scaler._get_scale_async())
        if scale is not None and not subject.label:
            self._step.scalars["loss_scale"] = scale
        return scale

    def _step_in_backward(self, optimizer: Optimizer) -> None:
        """Count the backward for a step: there is no moment at which all gradients exist."""
        self._calls.note_unsupported("optimizer step within backward")
        self._stepped_in_backward = True
        subject = self._subjects.first or self._subjects.of(optimizer)
        if subject is not None:
            self._note_learning_rate(subject)

    def _finish(self, subject: Subject) -> None:
        self._unscaled.add(subject.label)
        if subject.label:
            self._course.other_ended(subject.label)
        else:
            self._finish_first()

    def _finish_first(self) -> None:
        self._step.scalars.setdefault("skipped", 0.0)
        self._recorder.end(self._step, self._calls.take_probe_seconds())
        self._course.first_ended(self._subjects.strangers)
        self._phases.training(Phase.FORWARD, self._step.sequence)
        self._calls.on_step_end()


def _only(value: object) -> object:
    """Return the single element of a sequence of one, anything else as it is."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return value[0]
    return value
