"""Hooks on GradScaler: the loss before scaling, the moment of unscaling, and skipped steps."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.amp import GradScaler

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, Wrapper, untraced
from mp_agent.probe.isolation.guard import Guard
from mp_agent.probe.optimizers.library_optimizer import stepped_for

Report = Callable[[GradScaler, Any], None]


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `scale`, `unscale_` and `step` of GradScaler and of its subclasses that override them.

    Also of those that are yet to come: FSDP's ShardedGradScaler may be imported later. A scaler
    that is not enabled passes everything through and is not reported, nor is a step of what is no
    optimizer, and stands for none that is known.
    """
    wrappers = {
        "scale": _reporting(guard, "GradScaler.scale", None, None, events.loss_scaled),
        "unscale_": _reporting(guard, "GradScaler.unscale_", None, events.unscaled),
        "step": _reporting(
            guard, "GradScaler.step", events.scaler_step_begins, events.scaler_step_ended
        ),
    }

    def wrap_methods(owner: type[GradScaler]) -> None:
        for name, wrap in wrappers.items():
            if name in vars(owner):
                patches.replace(owner, name, wrap)

    for owner in family(GradScaler):
        wrap_methods(owner)
    patches.on_new_subclass(
        GradScaler, lambda owner: guard.run("new GradScaler", wrap_methods, owner)
    )


def _reporting(
    guard: Guard,
    kind: str,
    before: Report | None,
    after: Report | None,
    with_result: Callable[[GradScaler, Any, Any], None] | None = None,
) -> Wrapper:
    """Return a wrapper for one method that reports outermost calls, where overrides call super."""
    within = threading.local()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def method(self: GradScaler, argument: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(within, "call", False) or not self.is_enabled():
                return original(self, argument, *args, **kwargs)
            try:
                within.call = True
                if before is not None:
                    guard.run(kind, before, self, stepped_for(argument))
                result = original(self, argument, *args, **kwargs)
                if after is not None:
                    guard.run(kind, after, self, stepped_for(argument))
                if with_result is not None:
                    guard.run(kind, with_result, self, argument, result)
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
