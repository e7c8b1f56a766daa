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

    A scaler that is not enabled passes everything through and is not told of.
    """
    for name, before, after in (
        ("scale", events.loss_scaled, None),
        ("unscale_", None, events.unscaled),
        ("step", events.scaler_step_begins, events.scaler_step_ended),
    ):
        wrap = _teller(guard, f"GradScaler.{name}", before, after)
        for owner in _family(GradScaler):
            if name in vars(owner):
                patches.replace(owner, name, wrap)


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
