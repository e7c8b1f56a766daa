"""Hooks on every optimizer's step, by torch's own global registry, and on its closure."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def install(patches: Patches, events: Events, guard: Guard) -> None:
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
        guard.run(
            "optimizer",
            events.optimizer_step_begins,
            optimizer,
            has_closure=has_closure,
        )
        if closure is None or not has_closure or guard.closed:
            return None
        watched = _watched(closure, optimizer, events, guard)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        guard.run("optimizer", events.optimizer_step_ended, optimizer)

    def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def made(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            guard.run("new optimizer", events.optimizer_made, self)

        return made

    patches.replace(Optimizer, "__init__", wrap_init)
    patches.on_restore(register_optimizer_step_pre_hook(before).remove)
    patches.on_restore(register_optimizer_step_post_hook(after).remove)


def _watched(
    closure: Callable[..., Any], optimizer: Optimizer, events: Events, guard: Guard
) -> Callable[..., Any]:
    """Return a closure that calls `closure`, and reports each call."""

    @functools.wraps(closure, updated=())
    def watched(*args: Any, **kwargs: Any) -> Any:
        guard.run("closure", events.closure_begins, optimizer)
        try:
            result = closure(*args, **kwargs)
        except BaseException:
            guard.run("closure", events.closure_raised, optimizer)
            raise
        guard.run("closure", events.closure_returned, optimizer)
        return result

    return watched
