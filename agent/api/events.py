"""What a training script is called back for, or asks: conditions, and requests of the guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mp_agent.api.loading import load_probe, loaded_probe
from mp_agent.records.conditions import ConditionEvent

CheckpointCallback = TypeVar("CheckpointCallback", bound=Callable[[int], object])
ConditionCallback = TypeVar("ConditionCallback", bound=Callable[[ConditionEvent], object])


def on_condition(callback: ConditionCallback) -> ConditionCallback:
    """Have `callback(condition)` called when a condition begins to hold, and when it ceases to.

    On every rank, on the training thread, at the end of a step, a second or two after the finding;
    once per event. It may take its time, mark it with `phase`, and end training; an exception of
    its own is logged, counted and contained. Before or after `init()`; returns `callback`, so that
    it can decorate a function. A second registration of the same one changes nothing.

        @mp_agent.on_condition
        def save_early(condition: mp_agent.ConditionEvent) -> None:
            if condition.severity == "critical" and condition.state == "firing":
                request_checkpoint()

    Rank 0 logs each event, with its remedy, under the logger `mp_agent` as well.
    """
    if (api := load_probe()) is not None:
        api.on_condition(callback)
    return callback


def on_checkpoint_request(callback: CheckpointCallback) -> CheckpointCallback:
    """Have `callback(step)` called when the guard asks for a checkpoint.

    With the policy `request_checkpoint`, as often as its limits allow. On every rank, on the
    training thread, at the end of the same step, so that it may save by collectives; `step` is that
    step, the trainer's own where `observe` gives it. It may take its time; an exception of its own
    is logged, counted and contained. Before or after `init()`; returns `callback`, so that it can
    decorate a function. A second registration of the same one changes nothing. A request is
    `checkpoint_requested()` as well: use the one or the other.

        @mp_agent.on_checkpoint_request
        def save(step: int) -> None:
            torch.save(model.state_dict(), f"guard-{step}.pt")
    """
    if (api := load_probe()) is not None:
        api.on_checkpoint_request(callback)
    return callback


def checkpoint_requested() -> bool:
    """Return whether the guard has asked for a checkpoint since the last call.

    True once per request, at the same step on every rank, so that it may be asked of each in the
    training loop; False without the policy `request_checkpoint`. Never raises.
    """
    api = loaded_probe()
    return False if api is None else bool(api.checkpoint_requested())


def stop_requested() -> bool:
    """Return whether the guard has asked the training to stop.

    True from the same step on every rank; False without the policy `request_stop`. The guard ends
    nothing by itself. Never raises.
    """
    api = loaded_probe()
    return False if api is None else bool(api.stop_requested())
