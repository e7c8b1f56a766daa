"""Hooks on `zero_grad`: gradients that no optimizer has used are discarded."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, untraced
from mp_agent.probe.isolation.guard import Guard


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `zero_grad` of optimizers, which torch.compile does not trace, and of modules."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def zero_grad(self: Optimizer | nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                guard.run("zero_grad", events.gradients_cleared, self)
            return original(self, *args, **kwargs)

        return zero_grad

    patches.replace(Optimizer, "zero_grad", lambda original: untraced(wrap(original)))
    patches.replace(nn.Module, "zero_grad", wrap)
