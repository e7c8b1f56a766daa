"""Hooks on GradScaler: the loss before scaling, the moment of unscaling, and skipped steps."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.amp import GradScaler

from mp_agent.probe.guard import Guard
from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, Wrapper, untraced

Told = Callable[[GradScaler, Any], None]


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `scale`, `unscale_` and `step` of GradScaler and of its subclasses that override them.

    Also of those that are yet to come: FSDP's ShardedGradScaler may be imported later. A scaler
    that is not enabled passes everything through and is not told of.
    """
    wrappers = {
        "scale": _teller(guard, "GradScaler.scale", events.loss_scaled, None),
        "unscale_": _teller(guard, "GradScaler.unscale_", None, events.unscaled),
        "step": _teller(
            guard, "GradScaler.step", events.scaler_step_begins, events.scaler_step_ended
        ),
    }

    def wrap_methods(owner: type[GradScaler]) -> None:
        for name, wrap in wrappers.items():
            if name in vars(owner):
                patches.replace(owner, name, wrap)

    for owner in _family(GradScaler):
        wrap_methods(owner)
    _on_new_subclass(patches, lambda owner: guard.run("new GradScaler", wrap_methods, owner))


def _on_new_subclass(patches: Patches, tell: Callable[[type[GradScaler]], None]) -> None:
    """Have `tell` called with each class that is derived from GradScaler from now on."""
    earlier = vars(GradScaler).get("__init_subclass__")

    def made(cls: type[GradScaler], /, **kwargs: Any) -> None:
        if earlier is not None:
            earlier.__get__(None, cls)(**kwargs)
        else:
            super(GradScaler, cls).__init_subclass__(**kwargs)
        tell(cls)

    patches.put(GradScaler, "__init_subclass__", classmethod(made))


def _teller(guard: Guard, kind: str, before: Told | None, after: Told | None) -> Wrapper:
    """Return a wrapper for one method that tells of the outermost call, where overrides call up."""
    inside = False

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def method(self: GradScaler, subject: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside or not self.is_enabled():
                return original(self, subject, *args, **kwargs)
            inside = True
            try:
                if before is not None:
                    guard.run(kind, before, self, subject)
                result = original(self, subject, *args, **kwargs)
                if after is not None:
                    guard.run(kind, after, self, subject)
                return result
            finally:
                inside = False

        return untraced(method)

    return wrap


def _family(owner: type[GradScaler]) -> Iterator[type[GradScaler]]:
    yield owner
    for subclass in owner.__subclasses__():
        yield from _family(subclass)
