"""Hooks on CUDA graphs: which one is being captured, and when one is replayed.

Hooks within a captured step run once, while nothing is computed; a replay calls none of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap the methods of `torch.cuda.CUDAGraph`, where this torch has them."""

    def wrap_begin(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard.run("CUDA graph", events.graph_capture_begins, self)
            return original(self, *args, **kwargs)

        return capture_begin

    def wrap_end(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            guard.run("CUDA graph", events.graph_capture_ended)
            return result

        return capture_end

    def wrap_replay(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard.run("CUDA graph", events.graph_replayed, self)
            return original(self, *args, **kwargs)

        return replay

    wrappers = {"capture_begin": wrap_begin, "capture_end": wrap_end, "replay": wrap_replay}
    owner = torch.cuda.CUDAGraph
    for name, wrap in wrappers.items():
        if name in vars(owner):
            patches.replace(owner, name, wrap)
