"""Hook on torch's pipeline schedules, which divide gradients, and not losses, by micro-batches.

Some run their backwards through `torch.autograd.grad`, which no hook sees; the losses of all
micro-batches are known at the end of the schedule.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import schedules

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard
from mp_agent.probe.scalars import Scalar, add, scalar_of

_BASE = "_PipelineSchedule"


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `step` of the schedules, and what empties the list of losses at its end."""

    def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard.run("pipeline", events.schedule_runs, True)
            try:
                return original(self, *args, **kwargs)
            finally:
                guard.run("pipeline", events.schedule_runs, False)

        return step

    def wrap_losses(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _update_losses(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard.run("pipeline", _report, events, self)
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
