"""Hook on autocast: the dtype in which the run computes."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `autocast.__enter__`, for context managers and decorators alike."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(self: autocast_mode.autocast) -> Any:
            # Before autocast is on: a signal handler that raises here would leave it on for good.
            if not torch.compiler.is_compiling() and self._enabled and self.fast_dtype is not None:
                guard.run("autocast", events.autocast_entered, self.fast_dtype)
            return original(self)

        return enter

    patches.replace(autocast_mode.autocast, "__enter__", wrap)
