"""Hooks on Megatron-Core: its optimizers, its data parallel wrapper and its pipeline schedules.

Its modules are hooked once the user has imported them, be it before or after `init()`; nothing is
imported here. They are looked for as something of theirs is made: a module class of Megatron's, an
optimizer of torch, which its own ones wrap; and as the wrapper clears gradients before a step.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.engines.megatron import OptimizerReader, ScheduledLosses, multiplied_by
from mp_agent.probe.engines.megatron_gradients import BegunReductions
from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.loss import reporting
from mp_agent.probe.hooks.patches import Patches, Wrapper
from mp_agent.probe.isolation import Shield
from mp_agent.probe.scalars import scalar_of

_KIND = "Megatron"
_PACKAGE = "megatron.core."
_OPTIMIZERS = "megatron.core.optimizer.optimizer"
_WRAPPER = "megatron.core.distributed.distributed_data_parallel"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def install(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap what is imported already, and what will be."""
    hooks = _Hooks(patches, events, shield)
    hooks.look()

    def made(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            shield.run(_KIND, hooks.look)

        return __init__

    def new_module(owner: type[nn.Module]) -> None:
        if owner.__module__.startswith(_PACKAGE):
            shield.run(_KIND, hooks.look)

    patches.replace(Optimizer, "__init__", made)
    patches.on_new_subclass(nn.Module, new_module)


class _Hooks:
    """Knows which of Megatron's modules are hooked, and what they have announced of a step."""

    def __init__(self, patches: Patches, events: Events, shield: Shield) -> None:
        self._patches = patches
        self._events = events
        self._shield = shield
        self._thread = _Thread()
        self._losses = ScheduledLosses()
        self._reductions = BegunReductions()
        self._multiplied: weakref.ref[nn.Module] | None = None
        """The first chunk whose gradients were multiplied in the step under way."""
        self._waiting: dict[str, Callable[[Any], bool]] = {
            _OPTIMIZERS: self._hook_optimizers,
            _WRAPPER: self._hook_wrapper,
            _BUFFERS: self._hook_buffers,
            _SCHEDULES: self._hook_schedules,
        }

    def look(self) -> None:
        """Wrap what has been imported since the last look."""
        for name, hook in list(self._waiting.items()):
            module = sys.modules.get(name)
            if module is not None and hook(module):
                del self._waiting[name]

    def _hook_optimizers(self, module: Any) -> bool:
        base = vars(module).get("MegatronOptimizer")
        if not isinstance(base, type) or "ChainedOptimizer" not in vars(module):
            return False  # it is being imported
        wrappers: dict[str, Wrapper] = {
            "step": self._step,
            "prepare_grads": self._prepare,
            "step_with_ready_grads": self._step_when_ready,
            "scale_loss": self._scale_loss,
            "_init_optimizer_states_with_dummy_values": self._not_training,
        }

        def wrap_methods(owner: type) -> None:
            for name, wrap in wrappers.items():
                if name in vars(owner):
                    self._patches.replace(owner, name, wrap)

        for owner in _family(base):
            wrap_methods(owner)
        self._patches.on_new_subclass(
            base, lambda owner: self._shield.run(_KIND, wrap_methods, owner)
        )
        return True

    def _hook_wrapper(self, module: Any) -> bool:
        owner = vars(module).get("DistributedDataParallel")
        if not isinstance(owner, type):
            return False
        self._patches.replace(owner, "zero_grad_buffer", self._zero_grad_buffer)
        self._patches.replace(owner, "scale_gradients", self._scale_gradients)
        return True

    def _hook_buffers(self, module: Any) -> bool:
        owner = vars(module).get("_ParamAndGradBucketGroup")
        if not isinstance(owner, type) or "start_grad_sync" not in vars(owner):
            return False
        self._patches.replace(owner, "start_grad_sync", self._start_grad_sync)
        self._reductions.follow(owner)
        return True

    def _hook_schedules(self, module: Any) -> bool:
        if "forward_backward_pipelining_without_interleaving" not in vars(module):
            return False  # the last of its functions: it is being imported
        self._patches.replace(module, "forward_step", self._forward_step)
        self._patches.replace(module, "backward_step", self._backward_step)
        self._patches.replace(
            module, "custom_backward", reporting(self._patches, self._events, self._shield)
        )
        return True

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap it: the outermost one of a chain of optimizers is the step."""

        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._thread.within:
                return original(optimizer, *args, **kwargs)
            reader = self._begin(optimizer)
            reader.result = self._outermost(original, optimizer, args, kwargs)
            self._end(reader)
            return reader.result

        return step

    def _prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap it: called by itself it begins a step, and ends one with non-finite gradients."""

        @functools.wraps(original)
        def prepare_grads(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._thread.within:
                return original(optimizer, *args, **kwargs)
            reader = self._thread.prepared = self._begin(optimizer)
            found_inf = self._outermost(original, optimizer, args, kwargs)
            if found_inf:
                reader.result = False
                self._end(reader)
            return found_inf

        return prepare_grads

    def _step_when_ready(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap it: called by itself it ends a step."""

        @functools.wraps(original)
        def step_with_ready_grads(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._thread.within:
                return original(optimizer, *args, **kwargs)
            reader = self._thread.prepared or self._begin(optimizer)
            reader.result = self._outermost(original, optimizer, args, kwargs)
            self._end(reader)
            return reader.result

        return step_with_ready_grads

    def _begin(self, optimizer: Any) -> OptimizerReader:
        reader = OptimizerReader(optimizer, self._reductions)
        self._multiplied = None
        self._shield.run(_KIND, self._events.engine_step_begins, reader)
        return reader

    def _outermost(
        self, original: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any
    ) -> Any:
        """Call what steps, and calls in turn the same of other optimizers."""
        self._thread.within = True
        try:
            return original(optimizer, *args, **kwargs)
        except BaseException:
            self._thread.prepared = None
            self._shield.run(_KIND, self._events.engine_step_raised)
            raise
        finally:
            self._thread.within = False

    def _end(self, reader: OptimizerReader) -> None:
        self._thread.prepared = None
        self._shield.run(_KIND, self._events.engine_step_ended, reader)
        self._reductions.clear()

    def _scale_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale_loss(optimizer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            scaled = original(optimizer, loss, *args, **kwargs)
            self._shield.run(_KIND, self._announce_scaled, loss, scaled)
            return scaled

        return scale_loss

    def _announce_scaled(self, loss: object, scaled: object) -> None:
        if (value := scalar_of(loss)) is not None:
            self._events.engine_scaled(value, scaled)

    def _not_training(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what steps an optimizer with zeros, to make its state before it is loaded."""

        @functools.wraps(original)
        def fill_in(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._shield.run(_KIND, self._events.not_training, True)
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self._shield.run(_KIND, self._events.not_training, False)

        return fill_in

    def _zero_grad_buffer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def zero_grad_buffer(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._waiting:
                self._shield.run(_KIND, self.look)
            self._shield.run(_KIND, self._events.gradients_cleared, wrapper)
            return original(wrapper, *args, **kwargs)

        return zero_grad_buffer

    def _scale_gradients(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale_gradients(wrapper: nn.Module, factor: Any, *args: Any, **kwargs: Any) -> Any:
            self._shield.run(_KIND, self._announce_factor, wrapper, factor)
            return original(wrapper, factor, *args, **kwargs)

        return scale_gradients

    def _announce_factor(self, wrapper: nn.Module, factor: object) -> None:
        """Announce it once, of the first of several chunks of the model."""
        if self._multiplied is None:
            self._multiplied = weakref.ref(wrapper)
        if self._multiplied() is wrapper:
            self._events.gradients_multiplied(multiplied_by(wrapper, factor))

    def _start_grad_sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
            # By itself: where local gradients fail and rest, none is to look as if not reduced.
            self._shield.run("reductions that begin", self._reductions.add, group)
            self._shield.run("local gradients", self._announce_reduction, group)
            return original(group, *args, **kwargs)

        return start_grad_sync

    def _announce_reduction(self, group: Any) -> None:
        """Announce it unless it is under way already, when Megatron ignores the call."""
        if group.grad_reduce_handle is None:
            self._events.reduction_begins([bucket.grad_data for bucket in group.buckets])

    def _forward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if torch.is_grad_enabled():
                self._shield.run(_KIND, self._note_output, result)
            return result

        return forward_step

    def _note_output(self, result: Any) -> None:
        self._losses.made(result[0])

    def _backward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward_step(
            inputs: Any, output: Any, output_gradient: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._shield.run(_KIND, self._announce_loss, output, output_gradient)
            return original(inputs, output, output_gradient, *args, **kwargs)

        return backward_step

    def _announce_loss(self, output: object, gradient: object) -> None:
        if (loss := self._losses.taken(output, gradient)) is not None:
            self._events.engine_backward_begins(loss)


class _Thread(threading.local):
    """How far the step has come that this thread makes."""

    def __init__(self) -> None:
        self.within = False
        """Whether the outermost of the optimizers that step together is stepping."""
        self.prepared: OptimizerReader | None = None
        """Reader of an optimizer whose gradients are ready for a step that has not been made."""


def _family(owner: type) -> Iterator[type]:
    """Yield a class and all that are derived from it."""
    yield owner
    derived: list[type] = type.__subclasses__(owner)
    for subclass in derived:
        yield from _family(subclass)
