"""Hooks on GradScaler: the loss before scaling, the moment of unscaling, and skipped steps."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import GradScaler

from mp_agent.probe.guard import Guard
from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches

Told = Callable[[GradScaler, Any], None]


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `scale`, `unscale_` and `step` of GradScaler and of its subclasses that override them.

    A scaler that is not enabled passes everything through and is not told of.
    """

    def nothing(scaler: GradScaler, subject: object) -> None:
        return None

    for name, before, after in (
        ("scale", events.loss_scaled, nothing),
        ("unscale_", nothing, events.unscaled),
        ("step", events.scaler_step_begins, events.scaler_step_ended),
    ):
        wrap = functools.partial(_wrap, told=_Telling(guard, name, before, after))
        for owner in _family(GradScaler):
            if name in vars(owner):
                patches.replace(owner, name, wrap)


class _Telling:
    """Tells of one method's calls, of the outermost alone where an override calls up."""

    def __init__(self, guard: Guard, name: str, before: Told, after: Told) -> None:
        self._guard = guard
        self._kind = f"GradScaler.{name}"
        self._before = before
        self._after = after
        self._inside = False

    def call(
        self, original: Callable[..., Any], scaler: GradScaler, subject: Any, args: Any, kwargs: Any
    ) -> Any:
        if self._inside or torch.compiler.is_compiling() or not scaler.is_enabled():
            return original(scaler, subject, *args, **kwargs)
        self._inside = True
        try:
            self._guard.run(self._kind, self._before, scaler, subject)
            result = original(scaler, subject, *args, **kwargs)
            self._guard.run(self._kind, self._after, scaler, subject)
            return result
        finally:
            self._inside = False


def _wrap(original: Callable[..., Any], *, told: _Telling) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: GradScaler, subject: Any, *args: Any, **kwargs: Any) -> Any:
        return told.call(original, self, subject, args, kwargs)

    return method


def _family(owner: type[GradScaler]) -> Iterator[type[GradScaler]]:
    yield owner
    for subclass in owner.__subclasses__():
        yield from _family(subclass)
