"""Hook on steps that are not training: distributed checkpoints fill in optimizer state by one."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed.checkpoint import state_dict

from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard


class OtherSteps(Protocol):
    """What is notified of steps that are not training."""

    def not_training(self, stepping: bool) -> None:
        """Ignore every optimizer's step while `stepping`."""


def install(patches: Patches, events: OtherSteps, guard: Guard) -> None:
    """Wrap what steps an optimizer with zero gradients and a learning rate of zero."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fill_in(*args: Any, **kwargs: Any) -> Any:
            guard.run("state_dict", events.not_training, True)
            try:
                return original(*args, **kwargs)
            finally:
                guard.run("state_dict", events.not_training, False)

        return fill_in

    if hasattr(state_dict, "_init_optim_state"):
        patches.replace(state_dict, "_init_optim_state", wrap)
