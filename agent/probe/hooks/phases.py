"""Hooks on what is no step: evaluation, saving, autocast, graphs, seeds, scripting, and the end.

Hooks on CUDA graphs: which one is being captured, and when one is replayed.
Hooks within a captured step run once, while nothing is computed; a replay calls none of them.

Hooks on the signs of evaluation: a model's mode, stretches without gradients, generation.
All sit on classes, none on a module: hooks on modules make `torch.compile` recompile. Torch's
own stretches without gradients, such as FSDP's all-gathers within a forward, are none of training's
loop and are left alone.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from types import FrameType, FunctionType, ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import autocast_mode
from torch.distributed import checkpoint, distributed_c10d
from torch.distributed.checkpoint import state_dict_saver
from torch.jit import _recursive, _script
from torch.utils.data import dataloader

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, Wrapper
from mp_agent.probe.isolation import Shield


def install_autocast(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap `autocast.__enter__`, for context managers and decorators alike."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(self: autocast_mode.autocast) -> Any:
            # Before autocast is on: a signal handler that raises here would leave it on for good.
            if not torch.compiler.is_compiling() and self._enabled and self.fast_dtype is not None:
                with_gradients = torch.is_grad_enabled()
                shield.run("autocast", events.autocast_entered, self.fast_dtype, with_gradients)
            return original(self)

        return enter

    patches.replace(autocast_mode.autocast, "__enter__", wrap)


def install_graphs(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap the methods of `torch.cuda.CUDAGraph`, where this torch has them."""

    def wrap_begin(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            shield.run("CUDA graph", events.graph_capture_begins, self)
            return original(self, *args, **kwargs)

        return capture_begin

    def wrap_end(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            shield.run("CUDA graph", events.graph_capture_ended)
            return result

        return capture_end

    def wrap_replay(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
            shield.run("CUDA graph", events.graph_replayed, self)
            return original(self, *args, **kwargs)

        return replay

    wrappers = {"capture_begin": wrap_begin, "capture_end": wrap_end, "replay": wrap_replay}
    owner = torch.cuda.CUDAGraph
    for name, wrap in wrappers.items():
        if name in vars(owner):
            patches.replace(owner, name, wrap)


def install_scripting(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap what `torch.jit.script`, and `torch.jit.trace` of exported methods, come through."""

    def wrap_module(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compiling(*args: Any, **kwargs: Any) -> Any:
            shield.run("scripting", events.scripting)
            return original(*args, **kwargs)

        return compiling

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compiling(*args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
            shield.run("scripting", events.scripting)
            # The names that a class uses are looked up so many frames up, and this is one of them.
            return original(*args, _frames_up=_frames_up + 1, **kwargs)

        return compiling

    for module, name, wrapper in (
        (_script, "_script_impl", wrap),
        (_recursive, "create_script_module", wrap_module),
    ):
        if hasattr(module, name):
            patches.replace(module, name, wrapper)


class GroupEnd(Protocol):
    """What is notified of the end of process groups."""

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Act: a process group, None for all of them, is about to be destroyed."""


def install_teardown(patches: Patches, events: GroupEnd, shield: Shield) -> None:
    """Wrap `destroy_process_group`, under both names that it has."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def destroy(group: Any = None) -> None:
            ending = None if group is dist.group.WORLD else group
            shield.run("teardown", events.group_ends, ending)
            original(group)

        return destroy

    for module in (dist, distributed_c10d):
        patches.replace(module, "destroy_process_group", wrap)


def install_saving(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap every function that saves, under each name by which it is called."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            shield.run("saving", events.saving, True)
            try:
                return original(*args, **kwargs)
            finally:
                shield.run("saving", events.saving, False)

        return save

    for module, name in _savers():
        if callable(vars(module).get(name)):
            patches.replace(module, name, wrap)


def install_loading(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap `Module.load_state_dict`: what it leaves out is in its result alone."""

    def report(module: nn.Module, state: Any, result: Any) -> None:
        left_out = getattr(result, "unexpected_keys", None)
        if left_out is not None and isinstance(state, Mapping) and state:
            events.state_loaded(module, len(state), len(state) - len(left_out))

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            state = args[0] if args else kwargs.get("state_dict")
            shield.run("loading", report, self, state, result)
            return result

        return load_state_dict

    patches.replace(nn.Module, "load_state_dict", wrap)


def _savers() -> Iterator[tuple[ModuleType, str]]:
    for module in (torch, torch.serialization):
        yield module, "save"
    for module in (checkpoint, state_dict_saver):
        for name in ("save", "async_save", "save_state_dict", "_save_state_dict"):
            yield module, name
    if (safetensors := _safetensors()) is not None:
        yield safetensors, "serialize_file"  # what all who imported `save_file` by name call


def _safetensors() -> ModuleType | None:
    """Return the module that saves as safetensors, if it is there and works."""
    try:
        return importlib.import_module("safetensors.torch") if find_spec("safetensors") else None
    except Exception:
        return None


def install_evaluation(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap `Module.train`, which `eval` calls, `no_grad`, `inference_mode`, and data loaders."""
    patches.replace(nn.Module, "train", _mode(events, shield))
    stretch = _Stretch(events, shield)
    for owner, is_off in (
        (torch.no_grad, lambda: not torch.is_grad_enabled()),
        (torch.inference_mode, torch.is_inference_mode_enabled),
    ):
        patches.replace(owner, "__enter__", stretch.enter(is_off))
        patches.replace(owner, "__exit__", stretch.leave)
    patches.replace(dataloader._BaseDataLoaderIter, "__next__", _loading(events, shield))


def _mode(events: Events, shield: Shield) -> Wrapper:
    within = threading.local()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(self: nn.Module, mode: bool = True) -> Any:
            if torch.compiler.is_compiling() or getattr(within, "call", False):
                return original(self, mode)
            within.call = True  # a module calls this of its children
            before = bool(getattr(self, "training", False))
            try:
                result = original(self, mode)
            finally:
                within.call = False
            shield.run("mode", events.mode_changed, self, bool(mode), before)
            return result

        return train

    return wrap


class _Stretch:
    """The outermost stretch of a thread's code without gradients."""

    def __init__(self, events: Events, shield: Shield) -> None:
        self._events = events
        self._shield = shield
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
                    self._shield.run("no_grad", self._events.evaluation, "no gradients", True)
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
                self._shield.run("no_grad", self._events.evaluation, "no gradients", False)
            return result

        return leave


def _loading(events: Events, shield: Shield) -> Wrapper:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def following(self: Any) -> Any:
            if torch.is_grad_enabled():
                shield.run("loading", events.batch_loads, self)
            if events.between_steps:
                shield.run("loading", events.evaluation, "loading", not torch.is_grad_enabled())
            return original(self)

        return following

    return wrap


def install_random_numbers(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap `torch.manual_seed`, and `torch.set_rng_state`, with which `fork_rng` ends."""
    seeds, restores = (_setting_numbers(events, shield, seeded=each) for each in (True, False))
    if "_manual_seed_impl" in vars(torch.random):  # what it calls, by whatever name it is known
        patches.replace(torch.random, "_manual_seed_impl", seeds)
    else:
        patches.replace(torch.random, "manual_seed", seeds)
        if not patches.replace_inside(torch.manual_seed, seeds):
            patches.replace(torch, "manual_seed", seeds)
    for module in (torch, torch.random):
        patches.replace(module, "set_rng_state", restores)


def _setting_numbers(events: Events, shield: Shield, *, seeded: bool) -> Wrapper:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        # torch keeps its untraced form of a function among the attributes of that.
        @functools.wraps(original, updated=())
        def setting(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling() and events.between_steps:
                shield.run("random numbers", events.random_numbers_set, seeded)
            return result

        return setting

    return wrap


def _is_of_torch(frame: FrameType) -> bool:
    """Return whether code of torch's, as context or under a decorator, enters a context here."""
    module = frame.f_globals.get("__name__")
    if module == "torch.utils._contextlib":
        function = frame.f_locals.get("func")
        module = function.__module__ if isinstance(function, FunctionType) else None
    return isinstance(module, str) and module.partition(".")[0] == "torch"
