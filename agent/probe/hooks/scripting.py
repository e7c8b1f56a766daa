"""Hook on TorchScript, which compiles modules along with their hooks, and what they call."""

import functools
from collections.abc import Callable
from typing import Any

from torch.jit import _recursive, _script

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap what `torch.jit.script`, and `torch.jit.trace` of exported methods, come through."""

    def wrap_module(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compiling(*args: Any, **kwargs: Any) -> Any:
            guard.run("scripting", events.scripting)
            return original(*args, **kwargs)

        return compiling

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compiling(*args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
            guard.run("scripting", events.scripting)
            # The names that a class uses are looked up so many frames up, and this is one of them.
            return original(*args, _frames_up=_frames_up + 1, **kwargs)

        return compiling

    for module, name, wrapper in (
        (_script, "_script_impl", wrap),
        (_recursive, "create_script_module", wrap_module),
    ):
        if hasattr(module, name):
            patches.replace(module, name, wrapper)
