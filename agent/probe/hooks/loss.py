"""Hook on backward: the loss, and how far into the step the rank is."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, Wrapper, untraced
from mp_agent.probe.isolation.guard import Guard

_INPUTS = 3
"""Place of `inputs` among what follows the gradients."""


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `torch.autograd.backward`, which `Tensor.backward` calls by that name."""
    patches.replace(torch.autograd, "backward", reporting(patches, events, guard))


def reporting(patches: Patches, events: Events, guard: Guard) -> Wrapper:
    """Return a wrapper for a function that runs a backward from tensors, seeded with gradients.

    Backwards within a backward (reentrant checkpointing) are not reported.
    """
    within = threading.local()

    def begins(roots: Any, seeds: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        patches.wrap_imported()
        events.backward_begins(roots, seeds, _inputs(args, kwargs))

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            # No function of ours is called outside of the guard: it would be compiled.
            if getattr(within, "backward", False) or torch._C._current_graph_task_id() != -1:
                return original(tensors, grad_tensors, *args, **kwargs)
            raised = True
            try:
                within.backward = True
                guard.run("backward", begins, tensors, grad_tensors, args, kwargs)
                result = original(tensors, grad_tensors, *args, **kwargs)
                raised = False
                return result
            finally:
                within.backward = False
                guard.run("backward", events.backward_ended, raised=raised)

        return untraced(backward)

    return wrap


def _inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Return the tensors that get gradients by a call of `backward`; None: all leaves."""
    inputs = kwargs.get("inputs", args[_INPUTS] if len(args) > _INPUTS else None)
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    return list(inputs) if isinstance(inputs, (list, tuple)) else None
