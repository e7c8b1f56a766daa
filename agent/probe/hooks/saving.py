"""Hooks on checkpoint writers: `torch.save`, distributed checkpoints, safetensors."""

import functools
import importlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict_saver

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap every function that saves, under each name by which it is called."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            guard.run("saving", events.saving, True)
            try:
                return original(*args, **kwargs)
            finally:
                guard.run("saving", events.saving, False)

        return save

    for module, name in _savers():
        if callable(vars(module).get(name)):
            patches.replace(module, name, wrap)


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
