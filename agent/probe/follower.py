"""Follows the steps of training from event to event. Each method is told what its name says."""

from collections.abc import Callable
from math import nan
from time import perf_counter
from typing import NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.probe.facts import Traits
from mp_agent.probe.phases import PhaseMarks
from mp_agent.probe.recorder import Recorder
from mp_agent.probe.scalars import Scalar, add, reciprocal, scalar_of
from mp_agent.probe.step import OpenStep
from mp_agent.probe.subject import Subject
from mp_agent.records.steps import Phase


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
        self, subject: Subject, recorder: Recorder, phases: PhaseMarks, traits: Traits, calls: Calls
    ) -> None:
        self._subject = subject
        self._recorder = recorder
        self._phases = phases
        self._traits = traits
        self._calls = calls
        self._step = OpenStep(sequence=1, begun_seconds=nan)
        self._scaler: GradScaler | None = None
        """Has scaled a loss of the step under way, and has not unscaled the gradients yet."""
        self._loss_counted = False
        self._clipping_ours = False
        self._in_scaler_step = False
        self._in_optimizer_step = False
        self._optimizer_stepped = False

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
        self._recorder.flush(self._step)

    def autocast_entered(self, dtype: torch.dtype) -> None:
        """Note the precision."""
        self._traits.autocast_dtype = dtype

    def loss_scaled(self, scaler: GradScaler, outputs: object) -> None:
        """Take the loss before it is scaled; the backward that follows sees it scaled."""
        self._scaler = scaler
        self._traits.scaler_name = type(scaler).__name__
        if (loss := scalar_of(outputs)) is not None:
            self._step.add_loss(loss)
            self._loss_counted = True

    def backward_begins(self, tensors: object, gradients: object) -> None:
        """Take the loss, unless a scaler had it; what was measured so far is outdated."""
        self._calls.connect()
        self._step.measured = False
        self._step.backward_seconds = perf_counter()
        self._in_scaler_step = False  # left over from a step that raised
        self._phases.training(Phase.BACKWARD, self._step.sequence)
        loss = scalar_of(_only(tensors)) if _only(gradients) is None else None
        if loss is not None and not self._loss_counted:
            self._step.add_loss(loss)
        self._loss_counted = False

    def backward_ended(self) -> None:
        """Stand before the optimizer, or before the next micro-batch's forward."""
        self._phases.training(Phase.FORWARD, self._step.sequence)

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Look at the gradients, which are as the optimizer will see them."""
        if self._subject.claim(optimizer):
            self._note_loss_scale(scaler)
            self._scaler = None
            self._measure("unscale", 1.0)

    def clipping(self, parameters: list[torch.Tensor]) -> None:
        """Look at the gradients before they are clipped; they may still be scaled."""
        self._clipping_ours = self._subject.claim_holder(parameters)
        if not self._clipping_ours:
            return
        scale = None if self._scaler is None else self._note_loss_scale(self._scaler)
        self._measure("clip", 1.0 if scale is None else reciprocal(scale))

    def clipping_to(self, max_norm: object, total_norm: object) -> None:
        """Note the limit and the norm of the clipping that was announced."""
        limit, norm = scalar_of(max_norm), scalar_of(total_norm)
        if self._clipping_ours and limit is not None and norm is not None:
            self._step.scalars.update(clip_max_norm=limit, clip_norm=norm)

    def scaler_step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Watch whether the optimizer will be stepped."""
        if self._subject.claim(optimizer):
            self._note_loss_scale(scaler)
            self._in_scaler_step = True
            self._optimizer_stepped = False

    def scaler_step_ended(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """End the step: skipped, if the optimizer was not stepped."""
        if self._in_scaler_step and self._subject.is_current(optimizer):
            if not self._optimizer_stepped:
                self._step.scalars["skipped"] = 1.0
            self._finish()

    def optimizer_step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Look at the gradients if nobody has; of a fused optimizer take the skip flag."""
        if self._in_optimizer_step and not self._subject.is_current(optimizer):
            return  # an optimizer within the optimizer
        if not self._subject.claim(optimizer):
            return
        self._in_optimizer_step = self._optimizer_stepped = True
        if has_closure:
            self._calls.note_unsupported("optimizer step with a closure")
            return
        # GradScaler leaves these two to optimizers that unscale, and skip, by themselves.
        found_inf = scalar_of(getattr(optimizer, "found_inf", None))
        if found_inf is not None:
            self._step.scalars["skipped"] = found_inf
        scale = scalar_of(getattr(optimizer, "grad_scale", None))
        self._measure("optimizer_step", 1.0 if scale is None else reciprocal(scale))

    def optimizer_step_ended(self, optimizer: Optimizer) -> None:
        """End the step, unless the scaler will."""
        if self._in_optimizer_step and self._subject.is_current(optimizer):
            self._in_optimizer_step = False
            if not self._in_scaler_step:
                self._finish()

    def _measure(self, point: str, inverse_scale: Scalar) -> None:
        self._phases.training(Phase.OPTIMIZER, self._step.sequence)
        if self._step.measured:
            return
        self._calls.connect()
        if (rate := scalar_of(self._subject.learning_rate())) is not None:
            self._step.scalars.setdefault("learning_rate", rate)
        self._recorder.measure(self._step, point, inverse_scale)

    def _note_loss_scale(self, scaler: GradScaler) -> Scalar | None:
        """Note the scale in force, and return it; `get_scale()` would wait for the device."""
        scale = scalar_of(scaler._get_scale_async())
        if scale is not None:
            self._step.scalars["loss_scale"] = scale
        return scale

    def _finish(self) -> None:
        self._step.scalars.setdefault("skipped", 0.0)
        self._recorder.finish(self._step, self._calls.take_probe_seconds())
        self._in_scaler_step = self._in_optimizer_step = False
        self._scaler = None
        self._step = OpenStep(sequence=self._step.sequence + 1, begun_seconds=perf_counter())
        self._phases.training(Phase.FORWARD, self._step.sequence)
        self._calls.on_step_end()


def _only(value: object) -> object:
    """Return the single element of a sequence of one, anything else as it is."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return value[0]
    return value
