"""Hook on learning-rate schedulers: they may have counted steps from before a resume."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `LRScheduler.step`; schedulers with a `step` of their own are not observed."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if not torch.compiler.is_compiling():
                guard.run("scheduler", events.scheduler_stepped, self)
            return result

        return step

    patches.replace(LRScheduler, "step", wrap)
