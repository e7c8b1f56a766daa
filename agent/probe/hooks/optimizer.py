"""Hooks on every optimizer's step, by torch's own global registry."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mp_agent.probe.guard import Guard
from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Observe the beginning and the end of each optimizer's step.

    A step that `torch.compile` traces breaks its graph here, so that it can be looked at; torch's
    own optimizers break it anyway.
    """

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        guard.run(
            "optimizer",
            events.optimizer_step_begins,
            optimizer,
            has_closure=closure is not None,
        )

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        guard.run("optimizer", events.optimizer_step_ended, optimizer)

    patches.on_restore(register_optimizer_step_pre_hook(before).remove)
    patches.on_restore(register_optimizer_step_post_hook(after).remove)
