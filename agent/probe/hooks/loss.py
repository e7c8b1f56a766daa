"""Hooks on backward: the loss, and how far into the step the rank is.

Hook on torch's pipeline schedules, which divide gradients, and not losses, by micro-batches.
Some run their backwards through `torch.autograd.grad`, which no hook sees; the losses of all
micro-batches are known at the end of the schedule.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, Wrapper, untraced
from mp_agent.probe.isolation import Shield
from mp_agent.probe.scalars import Scalar, add, scalar_of

_INPUTS = 3
"""Place of `inputs` among what follows the gradients."""


def install_loss(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap `torch.autograd.backward`, which `Tensor.backward` calls by that name."""
    patches.replace(torch.autograd, "backward", reporting(patches, events, shield))


def reporting(patches: Patches, events: Events, shield: Shield) -> Wrapper:
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
            # No function of ours is called outside of the shield: it would be compiled.
            if getattr(within, "backward", False) or torch._C._current_graph_task_id() != -1:
                return original(tensors, grad_tensors, *args, **kwargs)
            raised = True
            try:
                within.backward = True
                shield.run("backward", begins, tensors, grad_tensors, args, kwargs)
                result = original(tensors, grad_tensors, *args, **kwargs)
                raised = False
                return result
            finally:
                within.backward = False
                shield.run("backward", events.backward_ended, raised=raised)

        return untraced(backward)

    return wrap


def _inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Return the tensors that get gradients by a call of `backward`; None: all leaves."""
    inputs = kwargs.get("inputs", args[_INPUTS] if len(args) > _INPUTS else None)
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    return list(inputs) if isinstance(inputs, (list, tuple)) else None


_BASE = "_PipelineSchedule"


def install_pipelining(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap `step` of the schedules, and what empties the list of losses at its end."""

    def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            shield.run("pipeline", events.schedule_runs, True)
            try:
                return original(self, *args, **kwargs)
            finally:
                shield.run("pipeline", events.schedule_runs, False)

        return step

    def wrap_losses(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _update_losses(self: Any, *args: Any, **kwargs: Any) -> Any:
            shield.run("pipeline", _report, events, self)
            return original(self, *args, **kwargs)

        return _update_losses

    base = getattr(schedules, _BASE, None)
    if base is None or "_update_losses" not in vars(base):
        return
    patches.replace(base, "_update_losses", wrap_losses)
    for owner in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        patches.replace(owner, "step", wrap_step)


def _report(events: Events, schedule: Any) -> None:
    """Report the loss that the gradients are of: the mean over micro-batches, or the sum."""
    if not getattr(schedule, "_has_backward", True):
        return
    total: Scalar | None = None
    for each in schedule._internal_losses:
        if (loss := scalar_of(each)) is None:
            return
        total = add(total, loss)
    if total is not None:
        divides = getattr(schedule, "scale_grads", True)
        events.schedule_ended(total / schedule._n_microbatches if divides else total)
