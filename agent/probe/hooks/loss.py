"""Hook on backward: the loss, and how far into the step the rank is."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from mp_agent.probe.guard import Guard
from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, untraced


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `torch.autograd.backward`, which `Tensor.backward` calls by that name.

    Backwards within a backward (reentrant checkpointing) are not told of.
    """
    depth = 0

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth > 0:
                return original(tensors, grad_tensors, *args, **kwargs)
            depth += 1
            try:
                guard.run("backward", events.backward_begins, tensors, grad_tensors)
                return original(tensors, grad_tensors, *args, **kwargs)
            finally:
                depth -= 1
                guard.run("backward", events.backward_ended)

        return untraced(backward)

    patches.replace(torch.autograd, "backward", wrap)
