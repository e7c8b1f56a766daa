"""Hooks on what an update is made of: gradients cleared, unscaled, clipped, and stepped with.

Hooks on gradient clipping: the gradients before it, its limit, and the norm that it found.
`clip_grad_norm_` is imported by name long before `init()`. All of torch's clipping functions share
a `no_grad` decorator, in whose closure the function proper is replaced; every import leads there.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, Wrapper, untraced
from mp_agent.probe.isolation import Shield
from mp_agent.probe.optimizers.live_objects import stepped_for


def install_clearing(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap `zero_grad` of optimizers, which torch.compile does not trace, and of modules."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def zero_grad(self: Optimizer | nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                shield.run("zero_grad", events.gradients_cleared, self)
            return original(self, *args, **kwargs)

        return zero_grad

    patches.replace(Optimizer, "zero_grad", lambda original: untraced(wrap(original)))
    patches.replace(nn.Module, "zero_grad", wrap)


def install_clipping(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap `clip_grad_norm_`, `clip_grads_with_norm_`, `clip_grad_value_`, and FSDP1's own."""

    def note_compiled() -> None:
        shield.run("clipping", events.clipping_compiled)

    # The compiler calls it while it traces, and leaves nothing of it in the graph.
    compiled = torch.compiler.assume_constant_result(note_compiled)  # type: ignore[no-untyped-call]

    def wrap_clip(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                compiled()
                return original(parameters, *args, **kwargs)
            parameters = _reusable(parameters)
            shield.run("clipping", events.clipping, _as_list(parameters))
            return original(parameters, *args, **kwargs)

        return clip

    def wrap_scaling_down(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                compiled()
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            parameters = _reusable(parameters)
            shield.run("clipping", events.clipping, _as_list(parameters))
            shield.run("clipping", events.clipping_to, max_norm, total_norm)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return clip

    def wrap_fsdp(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(model: FullyShardedDataParallel, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            shield.run("clipping", _report_model, events, model)
            total_norm = original(model, max_norm, *args, **kwargs)
            shield.run("clipping", events.clipping_to, max_norm, total_norm, of_all_ranks=True)
            return total_norm

        return clip

    def wrap_values(original: Callable[..., Any]) -> Callable[..., Any]:
        clip = wrap_clip(original)

        @functools.wraps(original)
        def clip_values(*args: Any, **kwargs: Any) -> Any:
            result = clip(*args, **kwargs)
            if not torch.compiler.is_compiling():
                shield.run("clipping", events.clipping_to, None, None)
            return result

        return clip_values

    _replace(patches, "clip_grad_norm_", wrap_clip)
    _replace(patches, "clip_grad_value_", wrap_values)
    _replace(patches, "_clip_grads_with_norm_", wrap_scaling_down)
    patches.replace(FullyShardedDataParallel, "clip_grad_norm_", wrap_fsdp)


def _report_model(events: Events, model: nn.Module) -> None:
    events.clipping(list(nn.Module.parameters(model)))


def _replace(
    patches: Patches, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    function = getattr(clip_grad, name, None)
    if function is not None and not patches.replace_inside(function, wrap):
        patches.replace(clip_grad, name, wrap)


def _reusable(parameters: Any) -> Any:
    """Return `parameters` so that they can be gone through twice.

    An empty generator stays one, since torch warns about it.
    """
    if isinstance(parameters, torch.Tensor):
        return parameters
    listed = list(parameters)
    if not listed and isinstance(parameters, GeneratorType):
        return parameters
    return listed


def _as_list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


Report = Callable[[GradScaler, Any], None]


def install_grad_scaler(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap `scale`, `unscale_` and `step` of GradScaler and of its subclasses that override them.

    Also of those that are yet to come: FSDP's ShardedGradScaler may be imported later. A scaler
    that is not enabled passes everything through and is not reported, nor is a step of what is no
    optimizer, and stands for none that is known.
    """
    wrappers = {
        "scale": _reporting(shield, "GradScaler.scale", None, None, events.loss_scaled),
        "unscale_": _reporting(shield, "GradScaler.unscale_", None, events.unscaled),
        "step": _reporting(
            shield, "GradScaler.step", events.scaler_step_begins, events.scaler_step_ended
        ),
    }

    def wrap_methods(owner: type[GradScaler]) -> None:
        for name, wrap in wrappers.items():
            if name in vars(owner):
                patches.replace(owner, name, wrap)

    for owner in family(GradScaler):
        wrap_methods(owner)
    patches.on_new_subclass(
        GradScaler, lambda owner: shield.run("new GradScaler", wrap_methods, owner)
    )


def _reporting(
    shield: Shield,
    kind: str,
    before: Report | None,
    after: Report | None,
    with_result: Callable[[GradScaler, Any, Any], None] | None = None,
) -> Wrapper:
    """Return a wrapper for one method that reports outermost calls, where overrides call super."""
    within = threading.local()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def method(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
            if getattr(within, "call", False) or not self.is_enabled():
                return original(self, *args, **kwargs)
            argument = args[0] if args else kwargs.get("outputs", kwargs.get("optimizer"))
            try:
                within.call = True
                if before is not None:
                    shield.run(kind, before, self, stepped_for(argument))
                result = original(self, *args, **kwargs)
                if after is not None:
                    shield.run(kind, after, self, stepped_for(argument))
                if with_result is not None:
                    shield.run(kind, with_result, self, argument, result)
                return result
            finally:
                within.call = False

        return untraced(method)

    return wrap


def family(owner: type[GradScaler]) -> Iterator[type[GradScaler]]:
    """Yield a class and all that are derived from it."""
    yield owner
    for subclass in owner.__subclasses__():
        yield from family(subclass)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def install_optimizer(patches: Patches, events: Events, shield: Shield) -> None:
    """Report the start and the end of each optimizer's step, and of its closure.

    A step that `torch.compile` traces breaks its graph here, so that it can be measured; torch's
    own optimizers break it anyway.
    """

    def before(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        has_closure = closure is not None and callable(closure)
        has_closure = has_closure and not torch.compiler.is_compiling()
        shield.run(
            "optimizer",
            events.optimizer_step_begins,
            optimizer,
            has_closure=has_closure,
        )
        if closure is None or not has_closure or shield.closed:
            return None
        watched = _watched(closure, optimizer, events, shield)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shield.run("optimizer", events.optimizer_step_ended, optimizer)

    def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def made(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            shield.run("new optimizer", events.optimizer_made, self)

        return made

    patches.replace(Optimizer, "__init__", wrap_init)
    patches.on_restore(register_optimizer_step_pre_hook(before).remove)
    patches.on_restore(register_optimizer_step_post_hook(after).remove)


def _watched(
    closure: Callable[..., Any], optimizer: Optimizer, events: Events, shield: Shield
) -> Callable[..., Any]:
    """Return a closure that calls `closure`, and reports each call."""

    @functools.wraps(closure, updated=())
    def watched(*args: Any, **kwargs: Any) -> Any:
        shield.run("closure", events.closure_begins, optimizer)
        try:
            result = closure(*args, **kwargs)
        except BaseException:
            shield.run("closure", events.closure_raised, optimizer)
            raise
        shield.run("closure", events.closure_returned, optimizer)
        return result

    return watched


def install_scheduler(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap `LRScheduler.step`; schedulers with a `step` of their own are not observed."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if not torch.compiler.is_compiling():
                shield.run("scheduler", events.scheduler_stepped, self)
            return result

        return step

    patches.replace(LRScheduler, "step", wrap)


class OtherSteps(Protocol):
    """What is notified of steps that are not training."""

    def not_training(self, stepping: bool) -> None:
        """Ignore every optimizer's step while `stepping`."""


def install_state_dict(patches: Patches, events: OtherSteps, shield: Shield) -> None:
    """Wrap what steps an optimizer with zero gradients and a learning rate of zero."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fill_in(*args: Any, **kwargs: Any) -> Any:
            shield.run("state_dict", events.not_training, True)
            try:
                return original(*args, **kwargs)
            finally:
                shield.run("state_dict", events.not_training, False)

        return fill_in

    if hasattr(state_dict, "_init_optim_state"):
        patches.replace(state_dict, "_init_optim_state", wrap)
