"""Hooks around updates of the weights, through which the guard acts on them."""

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mp_agent.probe.hooks.optimization import state_dict
from mp_agent.probe.hooks.optimization.grad_scaler import family
from mp_agent.probe.hooks.optimization.optimizer import Arguments
from mp_agent.probe.hooks.patches import Patches, Wrapper, untraced
from mp_agent.probe.isolation.guard import Guard
from mp_agent.probe.step.running_step import running_step


class Updates(Protocol):
    """What is notified of updates, and may change them. Calls are made through the guard."""

    def not_training(self, stepping: bool) -> None:
        """Ignore every optimizer's step while `stepping`: torch makes it to fill in state."""

    def uneven_inputs(self, begins: bool) -> None:
        """Note that ranks may make different numbers of updates from now on, or no longer do."""

    def update_begins(self, optimizer: Optimizer) -> None:
        """Act: the gradients are as `optimizer` will use them."""

    def update_ended(self, optimizer: Optimizer) -> None:
        """Restore: it has used them."""

    def scaler_step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Note that a GradScaler is asked to step `optimizer`."""

    def scaler_step_ended(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Note that it has, or has skipped the update."""

    def scaler_updated(self, scaler: GradScaler) -> None:
        """Act: a scaler has adapted its scale."""


def install_on_scalers(patches: Patches, updates: Updates, guard: Guard) -> None:
    """Wrap `step` and `update` of GradScaler; before the probe's own hooks, to lie within them."""
    within = threading.local()

    def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if getattr(within, "call", False) or not self.is_enabled():
                return original(self, optimizer, *args, **kwargs)
            try:
                within.call = True
                guard.run("the guard", updates.scaler_step_begins, self, optimizer)
                result = original(self, optimizer, *args, **kwargs)
                guard.run("the guard", updates.scaler_step_ended, self, optimizer)
                return result
            finally:
                within.call = False

        return untraced(step)

    def wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def update(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if self.is_enabled():
                guard.run("the guard's loss scale", updates.scaler_updated, self)
            return result

        return untraced(update)

    def wrap_methods(owner: type[GradScaler]) -> None:
        for name, wrap in (("step", wrap_step), ("update", wrap_update)):
            if name in vars(owner):
                patches.replace(owner, name, wrap)

    for owner in family(GradScaler):
        wrap_methods(owner)
    patches.on_new_subclass(
        GradScaler, lambda owner: guard.run("new GradScaler", wrap_methods, owner)
    )


def install_on_optimizers(patches: Patches, updates: Updates, guard: Guard) -> None:
    """Register hooks on every step; after the probe's own hooks, which measure before it acts."""
    state_dict.install(patches, updates, guard)
    _install_on_joins(patches, updates, guard)
    ends = _EndsOfUpdates(updates, guard)

    def before(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        guard.run("the guard's restoring", ends.watch, optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not callable(closure):
            guard.run("the guard", updates.update_begins, optimizer)
            return None
        guarded = _guarded(closure, optimizer, updates, guard)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": guarded}
        return (args[0], guarded, *args[2:]), kwargs

    patches.on_restore(register_optimizer_step_pre_hook(before).remove)
    patches.on_restore(ends.close)


def _install_on_joins(patches: Patches, updates: Updates, guard: Guard) -> None:
    """Wrap torch's contexts for uneven inputs, which repeat the model's collectives alone."""

    def wrap(begins: bool) -> Wrapper:
        def wrap_method(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def method(self: Join, *args: Any, **kwargs: Any) -> Any:
                try:
                    return original(self, *args, **kwargs)
                finally:
                    if getattr(self, "_enable", True):
                        guard.run("the guard's ranks", updates.uneven_inputs, begins)

            return method

        return wrap_method

    if dist.is_available():
        patches.replace(Join, "__enter__", wrap(True))
        patches.replace(Join, "__exit__", wrap(False))


class _EndsOfUpdates:
    """Hooks on the end of each optimizer's step, of which torch calls no other before.

    The script's own hooks, and what the probe calls, such as a callback that saves a checkpoint,
    then find gradients and learning rates as they are without the guard.
    """

    def __init__(self, updates: Updates, guard: Guard) -> None:
        self._updates = updates
        self._guard = guard
        self._hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = (
            weakref.WeakKeyDictionary()
        )

    def watch(self, optimizer: Optimizer) -> None:
        """Register the hook, once."""
        if optimizer not in self._hooks:
            after = _EndOfUpdate(self._updates, self._guard)
            hook = self._hooks[optimizer] = optimizer.register_step_post_hook(after)
            hooks: OrderedDict[int, Any] = cast(Any, optimizer._optimizer_step_post_hooks)
            hooks.move_to_end(hook.id, last=False)

    def close(self) -> None:
        """Remove all hooks; that of a step under way, which torch is calling, does nothing more."""
        for optimizer, hook in list(self._hooks.items()):
            if running_step(id(optimizer)) is None:
                hook.remove()


class _EndOfUpdate:
    """Such a hook; a copy of an optimizer that copies its hooks has one that does nothing."""

    __slots__ = ("_guard", "_updates")

    def __init__(self, updates: Updates, guard: Guard) -> None:
        self._updates, self._guard = updates, guard

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._guard.run("the guard's restoring", self._updates.update_ended, optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library alone: what is saved must load where mp_agent is not installed.
        return getattr, (nullcontext(), "__exit__")


def _guarded(
    closure: Callable[..., Any], optimizer: Optimizer, updates: Updates, guard: Guard
) -> Callable[..., Any]:
    """Return a closure that acts on the gradients of the first call, before they are used."""
    calls = 0

    @functools.wraps(closure, updated=())
    def guarded(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        try:
            result = closure(*args, **kwargs)
        except BaseException:
            guard.run("the guard's restoring", updates.update_ended, optimizer)
            raise
        calls += 1
        if calls == 1:
            guard.run("the guard", updates.update_begins, optimizer)
        return result

    return guarded
