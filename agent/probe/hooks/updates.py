"""Hooks around updates of the weights, through which the guard acts on them."""

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Protocol

import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mp_agent.probe.hooks.optimization import family, install_state_dict
from mp_agent.probe.hooks.patches import Patches, Wrapper, untraced
from mp_agent.probe.isolation import Shield
from mp_agent.probe.step.thread_progress import STEP

_WRAPPERS_AT_MOST = 8


class Updates(Protocol):
    """What is notified of updates, and may change them. Calls are made through the shield."""

    def not_training(self, stepping: bool) -> None:
        """Ignore every optimizer's step while `stepping`: torch makes it to fill in state."""

    def uneven_inputs(self, begins: bool) -> None:
        """Note that ranks may make different numbers of updates from now on, or no longer do."""

    def update_begins(self, optimizer: Optimizer) -> None:
        """Act: the gradients are as `optimizer` will use them."""

    def update_ended(self, optimizer: Optimizer) -> None:
        """Restore: it has used them."""

    def rates_of_script(self, optimizer: Optimizer) -> Mapping[int, Any]:
        """Return the learning rates that are lowered at present as they were, by their groups."""

    def out_of_reach(self) -> None:
        """Note that updates of an optimizer cannot be acted on."""

    def scaler_step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Note that a GradScaler is asked to step `optimizer`."""

    def scaler_step_ended(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Note that it has, or has skipped the update."""

    def scaler_updated(self, scaler: GradScaler) -> None:
        """Act: a scaler has adapted its scale."""


def install_on_scalers(patches: Patches, updates: Updates, shield: Shield) -> None:
    """Wrap `step` and `update` of GradScaler; before the probe's own hooks, to lie within them."""
    within = threading.local()

    def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if getattr(within, "call", False) or not self.is_enabled():
                return original(self, optimizer, *args, **kwargs)
            try:
                within.call = True
                shield.run("the guard", updates.scaler_step_begins, self, optimizer)
                result = original(self, optimizer, *args, **kwargs)
                shield.run("the guard", updates.scaler_step_ended, self, optimizer)
                return result
            finally:
                within.call = False

        return untraced(step)

    def wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def update(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if self.is_enabled():
                shield.run("the guard's loss scale", updates.scaler_updated, self)
            return result

        return untraced(update)

    def wrap_methods(owner: type[GradScaler]) -> None:
        for name, wrap in (("step", wrap_step), ("update", wrap_update)):
            if name in vars(owner):
                patches.replace(owner, name, wrap)

    for owner in family(GradScaler):
        wrap_methods(owner)
    patches.on_new_subclass(
        GradScaler, lambda owner: shield.run("new GradScaler", wrap_methods, owner)
    )


def install_on_optimizers(patches: Patches, updates: Updates, shield: Shield) -> None:
    """Act within every step, as close to the optimizer's own code as can be.

    All hooks on steps run outside of that, those of the script's included, and so does what follows
    a step that raises: they find gradients and learning rates as they are without the guard.
    """
    install_state_dict(patches, updates, shield)
    _install_on_joins(patches, updates, shield)
    _install_on_saving(patches, updates)
    reached: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            closure = kwargs.get("closure", args[0] if args else None)
            try:
                if closure is None or not callable(closure):
                    shield.run("the guard", updates.update_begins, self)
                elif "closure" in kwargs:
                    kwargs = {**kwargs, "closure": _guarded(closure, self, updates, shield)}
                else:
                    args = (_guarded(closure, self, updates, shield), *args[1:])
                return original(self, *args, **kwargs)
            finally:
                try:
                    shield.run("the guard's restoring", updates.update_ended, self)
                finally:  # again, where a signal handler has raised within
                    shield.run("the guard's restoring", updates.update_ended, self)

        return untraced(step)

    def reach(owner: type) -> None:
        """Wrap what the steps of a class run, which torch's own wrapper holds."""
        for each in owner.__mro__:
            if "step" in vars(each) and each not in reached:
                hooked = _hooked_by_torch(vars(each)["step"])
                reached[each] = hooked is not None and patches.replace_inside(hooked, wrap)
        reached[owner] = any(reached.get(each, False) for each in owner.__mro__)
        if not reached[owner]:
            updates.out_of_reach()

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if type(optimizer) not in reached:
            shield.run("the guard's optimizer", reach, type(optimizer))

    patches.on_restore(register_optimizer_step_pre_hook(before).remove)


def _hooked_by_torch(step: object) -> Callable[..., Any] | None:
    """Return torch's wrapper with the hooks, which others may have wrapped; None without one."""
    for _ in range(_WRAPPERS_AT_MOST):
        if isinstance(step, FunctionType) and step.__code__ is STEP:
            return step
        step = getattr(step, "__wrapped__", None)
    return None


def _install_on_saving(patches: Patches, updates: Updates) -> None:
    """Save the rates of the script also within a step: a signal handler may want to, and exit."""

    def with_rates(optimizer: Optimizer, saved: Any) -> Any:
        rates = updates.rates_of_script(optimizer)
        if not rates or not isinstance(saved, dict) or "param_groups" not in saved:
            return saved
        groups = [
            {**group, "lr": rates[number]} if number in rates else group
            for number, group in enumerate(saved["param_groups"])
        ]
        return {**saved, "param_groups": groups}

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return with_rates(self, original(self, *args, **kwargs))

        return untraced(save)

    for name in ("state_dict", "__getstate__"):
        patches.replace(Optimizer, name, wrap)


def _install_on_joins(patches: Patches, updates: Updates, shield: Shield) -> None:
    """Wrap torch's contexts for uneven inputs, which repeat the model's collectives alone."""

    def wrap(begins: bool) -> Wrapper:
        def wrap_method(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def method(self: Join, *args: Any, **kwargs: Any) -> Any:
                try:
                    return original(self, *args, **kwargs)
                finally:
                    if getattr(self, "_enable", True):
                        shield.run("the guard's ranks", updates.uneven_inputs, begins)

            return method

        return wrap_method

    if dist.is_available():
        patches.replace(Join, "__enter__", wrap(True))
        patches.replace(Join, "__exit__", wrap(False))


def _guarded(
    closure: Callable[..., Any], optimizer: Optimizer, updates: Updates, shield: Shield
) -> Callable[..., Any]:
    """Return a closure that acts on the gradients of the first call, before they are used."""
    calls = 0

    @functools.wraps(closure, updated=())
    def guarded(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = closure(*args, **kwargs)
        calls += 1
        if calls == 1:
            shield.run("the guard", updates.update_begins, optimizer)
        return result

    return guarded
