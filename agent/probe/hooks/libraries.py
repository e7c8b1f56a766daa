"""Hooks on libraries with their own optimizers or accumulation: fastai, Keras and accelerate.

Hooks on fastai, whose optimizers are its own, and which hands a GradScaler a callback to step.
Its learners may hold an optimizer of torch as well (`OptimWrapper`), which torch's hooks see.

Hooks on Keras' optimizers, which on the torch backend step with gradients that they are handed.
They unscale, accumulate and clip themselves: what `_clip_gradients` receives is averaged over
the micro-batches and unscaled, and not yet clipped.

A hook on accelerate's backward, which divides each loss by the micro-batches of a step. Only within
`accumulate`, and through the optimizer that `prepare` returns, does a step wait for all of them.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, Wrapper, untraced
from mp_agent.probe.isolation import Shield
from mp_agent.probe.optimizers.engine import EngineResult, EngineStep
from mp_agent.probe.optimizers.live_objects import (
    LibraryOptimizer,
    show_by,
    substitute,
    view_of,
)
from mp_agent.probe.scalars import Scalar, scalar_of, snapshot_of


def install_fastai(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap fastai's optimizer and its callback for mixed precision, once they are imported."""

    def reporting(
        before: Callable[[LibraryOptimizer], None] | None,
        after: Callable[[LibraryOptimizer], None] | None,
    ) -> Wrapper:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if before is not None:
                    shield.run("fastai", lambda: before(_shown_fastai(self)))
                result = original(self, *args, **kwargs)
                if after is not None:
                    shield.run("fastai", lambda: after(_shown_fastai(self)))
                return result

            return method

        return wrap

    def step_begins(view: LibraryOptimizer) -> None:
        events.optimizer_step_begins(view, has_closure=False)

    def wrap_optimizer(owner: type) -> None:
        show_by(owner, _shown_fastai)
        patches.replace(owner, "__init__", reporting(None, events.optimizer_made))
        patches.replace(owner, "zero_grad", reporting(events.gradients_cleared, None))
        patches.replace(owner, "step", reporting(step_begins, events.optimizer_step_ended))

    def wrap_before_step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def before_step(self: Any) -> Any:
            shield.run("fastai", _name_optimizer, self)
            return original(self)

        return before_step

    def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            shield.run("fastai", events.scaler_lets_step)
            return original(self, *args, **kwargs)

        return step

    def wrap_mixed_precision(owner: type) -> None:
        patches.replace(owner, "before_step", wrap_before_step)
        patches.replace(owner, "step", wrap_step)

    patches.once_imported("fastai.optimizer", "Optimizer", wrap_optimizer, shield)
    patches.once_imported("fastai.callback.fp16", "MixedPrecision", wrap_mixed_precision, shield)


def _shown_fastai(optimizer: Any) -> LibraryOptimizer:
    """Return the view of an optimizer with the groups that this has now."""
    view = view_of(optimizer)
    view.show(zip(optimizer.param_lists, map(dict, optimizer.hypers), strict=True))
    return view


def _name_optimizer(callback: Any) -> None:
    """Say which optimizer the callback passes itself off as."""
    optimizer = callback.learn.opt
    inner = getattr(optimizer, "opt", None)  # of a wrapper: torch's, or fastai's own
    inner = optimizer if inner is None else inner
    substitute(callback, inner if isinstance(inner, Optimizer) else _shown_fastai(inner))


_BASE = "keras.src.optimizers.base_optimizer", "BaseOptimizer"
_SCALER = "keras.src.optimizers.loss_scale_optimizer", "LossScaleOptimizer"
_POLICIES = "keras.src.dtype_policies.dtype_policy"

CLIPPED_ALONE = "limit and coefficient of Keras' clipnorm, which clips each variable alone"


class _KerasStep:
    """Implements `optimizers.engine.Engine` for one call of `apply`."""

    def __init__(self, optimizer: Any, variables: Iterable[Any]) -> None:
        self.variables = list(variables)
        self.begun = False
        self.optimizer: LibraryOptimizer = _shown_keras(optimizer)
        self.scaler_name = ""
        self.loss_scale: Scalar | None = None
        self.gradient_scale: Scalar | None = None
        self.skipped = False
        limit = optimizer.global_clipnorm
        self._limit = float(limit) if limit and limit > 0 else None

    def begin(self) -> EngineStep:
        """Return the scales."""
        return EngineStep(
            loss_scale=self.loss_scale, gradient_scale=self.gradient_scale, completed=None
        )

    def end(self) -> EngineResult:
        """Return what became of the step."""
        return EngineResult(skipped=self.skipped, clip_max_norm=self._limit, norm=None)


class _Progress(threading.local):
    """What a thread is in: the call of `apply`, and the loss scale of the scaler around it."""

    def __init__(self) -> None:
        self.step: _KerasStep | None = None
        self.scaler: Any = None
        self.scale: Scalar | None = None
        self.reached = False
        """The scaler has passed the gradients on to its optimizer."""


def install_keras(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap Keras' optimizers and their scaling of the loss, once the program has imported them."""
    hooks = _Hooks(events, shield)

    def wrap_optimizer(owner: type) -> None:
        if not _uses_torch():
            return
        show_by(owner, _shown_keras)
        patches.replace(owner, "apply", hooks.wrap_apply)
        patches.replace(owner, "_clip_gradients", hooks.wrap_clip)
        patches.replace(owner, "scale_loss", hooks.wrap_scale)

    def wrap_scaler(owner: type) -> None:
        if _uses_torch():
            patches.replace(owner, "apply", hooks.wrap_scaler_apply)
            patches.replace(owner, "scale_loss", hooks.wrap_scale)

    patches.once_imported(*_BASE, wrap_optimizer, shield)
    patches.once_imported(*_SCALER, wrap_scaler, shield)


class _Hooks:
    """The wrappers of the optimizers' methods."""

    def __init__(self, events: Events, shield: Shield) -> None:
        self._events = events
        self._shield = shield
        self._now = _Progress()
        self._known: weakref.WeakSet[LibraryOptimizer] = weakref.WeakSet()

    def wrap_apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what takes the gradients: it steps with them, or adds them to those before."""

        @functools.wraps(original, updated=())
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = None if trainable_variables is None else list(trainable_variables)
            self._shield.run("Keras", self._apply_begins, optimizer, grads, variables)
            try:
                return original(optimizer, grads, variables)
            finally:
                raised = sys.exc_info()[0] is not None
                self._shield.run("Keras", self._apply_ended, optimizer, raised)

        return untraced(apply)

    def wrap_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what receives the gradients as the update will use them but for clipping."""

        @functools.wraps(original, updated=())
        def _clip_gradients(optimizer: Any, grads: Any) -> Any:
            self._shield.run("Keras", self._update_begins, optimizer, grads)
            return original(optimizer, grads)

        return untraced(_clip_gradients)

    def wrap_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the scaling of the loss."""

        @functools.wraps(original)
        def scale_loss(optimizer: Any, loss: Any) -> Any:
            scaled = original(optimizer, loss)
            if scaled is not loss and not torch.compiler.is_compiling():
                self._shield.run("Keras", self._scaled, loss, scaled)
            return scaled

        return scale_loss

    def wrap_scaler_apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a scaler's own, which passes finite gradients on to another optimizer."""

        @functools.wraps(original, updated=())
        def apply(scaler: Any, grads: Any, trainable_variables: Any = None) -> Any:
            self._shield.run("Keras", self._scaler_begins, scaler)
            try:
                return original(scaler, grads, trainable_variables)
            finally:
                raised = sys.exc_info()[0] is not None
                self._shield.run(
                    "Keras", self._scaler_ended, scaler, grads, trainable_variables, raised
                )

        return untraced(apply)

    def _apply_begins(self, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        now = self._now
        now.reached = True
        known = optimizer._trainable_variables if variables is None else variables
        pairs = zip(known, grads, strict=True)
        stepped = [v for v, g in pairs if g is not None and not _is_overwritten(v)]
        now.step = _KerasStep(optimizer, stepped)
        if optimizer.gradient_accumulation_steps:
            self._events.loss_divided(optimizer.gradient_accumulation_steps)

    def _update_begins(self, optimizer: Any, grads: Sequence[Any]) -> None:
        now = self._now
        step = now.step
        if step is None or step.begun or len(grads) != len(step.variables):
            return
        step.begun = True
        if now.scaler is not None:
            step.scaler_name, step.loss_scale = type(now.scaler).__name__, now.scale
        elif optimizer.loss_scale_factor is not None:
            step.scaler_name = type(optimizer).__name__
            step.loss_scale = float(optimizer.loss_scale_factor)
        self._step_begins(optimizer, step, grads)

    def _step_begins(self, optimizer: Any, step: _KerasStep, grads: Sequence[Any]) -> None:
        view = step.optimizer
        _show(view, optimizer)  # a first call has built it meanwhile
        if view not in self._known:
            self._known.add(view)
            if (dtype := _compute_dtype()) is not None:
                self._events.autocast_entered(dtype, with_gradients=False)
        if optimizer.clipnorm and optimizer.clipnorm > 0:
            self._events.unsupported(CLIPPED_ALONE)
        view.given = {
            id(_tensor_of(variable)): gradient.detach()
            for variable, gradient in zip(step.variables, grads, strict=True)
            if isinstance(gradient, torch.Tensor)
        }
        try:
            self._events.engine_step_begins(step)
        finally:
            view.given = None

    def _apply_ended(self, optimizer: Any, raised: bool) -> None:
        step, self._now.step = self._now.step, None
        if step is None:
            return
        if raised:
            if step.begun:
                self._events.engine_step_raised()
        elif step.begun:
            self._events.engine_step_ended(step)
        else:
            self._events.gradients_kept()

    def _scaled(self, loss: Any, scaled: Any) -> None:
        if (value := scalar_of(loss)) is not None:
            self._events.engine_scaled(value, scaled)

    def _scaler_begins(self, scaler: Any) -> None:
        now = self._now
        now.scaler, now.reached = scaler, False
        now.scale = float(scaler.initial_scale)
        if scaler.built:
            now.scale = snapshot_of(_tensor_of(scaler.dynamic_scale))

    def _scaler_ended(self, scaler: Any, grads: Any, variables: Any, raised: bool) -> None:
        now = self._now
        scale, reached = now.scale, now.reached
        now.scaler = now.scale = None
        if reached or raised:
            return
        optimizer = scaler.inner_optimizer
        known = optimizer._trainable_variables if variables is None else variables
        pairs = [(v, g) for v, g in zip(known, grads, strict=True) if g is not None]
        step = _KerasStep(optimizer, [variable for variable, _ in pairs])
        step.scaler_name, step.skipped = type(scaler).__name__, True
        step.loss_scale = step.gradient_scale = scale
        self._step_begins(optimizer, step, [gradient for _, gradient in pairs])
        self._events.engine_step_ended(step)


def install_accelerate(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap accelerate's backward, once the program has imported it."""

    def wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            shield.run("accelerate", _announce_micro_batch, events, accelerator)
            return original(accelerator, *args, **kwargs)

        return backward

    def wrap(owner: type) -> None:
        patches.replace(owner, "backward", wrap_backward)

    patches.once_imported("accelerate.accelerator", "Accelerator", wrap, shield)


def _announce_micro_batch(events: Events, accelerator: Any) -> None:
    state = accelerator.gradient_state
    if state.num_steps > 1 and accelerator.distributed_type.value not in _OWN_ACCUMULATION:
        last = state.sync_with_dataloader and state.end_of_dataloader
        events.micro_batch_begins(state.num_steps, last=last)


_OWN_ACCUMULATION = ("DEEPSPEED", "MEGATRON_LM")
"""Values of accelerate's `DistributedType` whose engines count micro-batches themselves."""


def _uses_torch() -> bool:
    backend = sys.modules.get("keras.src.backend.config")
    return backend is not None and backend.backend() == "torch"


def _shown_keras(optimizer: Any) -> LibraryOptimizer:
    view = view_of(optimizer)
    _show(view, optimizer)
    return view


def _show(view: LibraryOptimizer, optimizer: Any) -> None:
    """Let the view have the variables that the optimizer has now, and its learning rate."""
    variables = [v for v in optimizer._trainable_variables if _tensor_of(v) is not None]
    if not variables:
        return
    rate = optimizer._get_current_learning_rate()
    names = [str(variable.path).replace("/", ".") for variable in variables]
    group = {"lr": getattr(rate, "value", rate), "param_names": names}
    view.show([([_tensor_of(variable) for variable in variables], group)])


def _tensor_of(variable: Any) -> Any:
    """Return the tensor of a variable itself, not cast as a layer may see it."""
    return getattr(variable, "_value", None)


def _is_overwritten(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _compute_dtype() -> torch.dtype | None:
    """Return the dtype in which layers compute by default, where it is not that of variables."""
    policies = sys.modules.get(_POLICIES)
    policy = None if policies is None else policies.dtype_policy()
    if policy is None or policy.compute_dtype == policy.variable_dtype:
        return None
    found = getattr(torch, str(policy.compute_dtype), None)
    return found if isinstance(found, torch.dtype) else None
