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

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compiling(*args: Any, **kwargs: Any) -> Any:
            guard.run("scripting", events.scripting)
            return original(*args, **kwargs)

        return compiling

    for module, name in ((_script, "_script_impl"), (_recursive, "create_script_module")):
        if hasattr(module, name):
            patches.replace(module, name, wrap)
