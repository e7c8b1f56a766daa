"""Hooks on the signs of evaluation: a model's mode, stretches without gradients, generation.

All sit on classes, none on a module: hooks on modules make `torch.compile` recompile. Torch's
own stretches without gradients, such as FSDP's all-gathers within a forward, are none of training's
loop and are left alone.
"""

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.data import dataloader

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, Wrapper
from mp_agent.probe.isolation.guard import Guard


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `Module.train`, which `eval` calls, `no_grad`, `inference_mode`, and data loaders."""
    patches.replace(nn.Module, "train", _mode(events, guard))
    stretch = _Stretch(events, guard)
    for owner, is_off in (
        (torch.no_grad, lambda: not torch.is_grad_enabled()),
        (torch.inference_mode, torch.is_inference_mode_enabled),
    ):
        patches.replace(owner, "__enter__", stretch.enter(is_off))
        patches.replace(owner, "__exit__", stretch.leave)
    patches.replace(dataloader._BaseDataLoaderIter, "__next__", _loading(events, guard))


def _mode(events: Events, guard: Guard) -> Wrapper:
    within = threading.local()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(self: nn.Module, mode: bool = True) -> Any:
            if torch.compiler.is_compiling() or getattr(within, "call", False):
                return original(self, mode)
            within.call = True  # a module calls this of its children
            try:
                result = original(self, mode)
            finally:
                within.call = False
            guard.run("mode", events.mode_changed, self, bool(mode))
            return result

        return train

    return wrap


class _Stretch:
    """The outermost stretch of a thread's code without gradients."""

    def __init__(self, events: Events, guard: Guard) -> None:
        self._events = events
        self._guard = guard
        self._within = threading.local()

    def enter(self, is_off: Callable[[], bool]) -> Wrapper:
        """Return the wrapper for `__enter__`."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def enter(context: Any) -> Any:
                if torch.compiler.is_compiling() or is_off() or not self._events.between_steps:
                    return original(context)
                # Before gradients are off: a signal handler that raises here leaves them on.
                if not _is_of_torch(sys._getframe(1)):
                    self._within.outermost = context
                    self._guard.run("no_grad", self._events.evaluation, "no gradients", True)
                return original(context)

            return enter

        return wrap

    def leave(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `__exit__`."""

        @functools.wraps(original)
        def leave(context: Any, *error: Any) -> Any:
            result = original(context, *error)
            if getattr(self._within, "outermost", None) is context:
                self._within.outermost = None
                self._guard.run("no_grad", self._events.evaluation, "no gradients", False)
            return result

        return leave


def _loading(events: Events, guard: Guard) -> Wrapper:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def following(self: Any) -> Any:
            if events.between_steps:
                guard.run("loading", events.evaluation, "loading", not torch.is_grad_enabled())
            return original(self)

        return following

    return wrap


def _is_of_torch(frame: FrameType) -> bool:
    """Return whether code of torch's, as context or under a decorator, enters a context here."""
    module = frame.f_globals.get("__name__")
    if module == "torch.utils._contextlib":
        function = frame.f_locals.get("func")
        module = function.__module__ if isinstance(function, FunctionType) else None
    return isinstance(module, str) and module.partition(".")[0] == "torch"
