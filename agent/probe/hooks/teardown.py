"""Hook on `destroy_process_group`: what gradients were reduced with is released before."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard


class GroupEnd(Protocol):
    """What is notified of the end of process groups."""

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Act: a process group, None for all of them, is about to be destroyed."""


def install(patches: Patches, events: GroupEnd, guard: Guard) -> None:
    """Wrap `destroy_process_group`, under both names that it has."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def destroy(group: Any = None) -> None:
            ending = None if group is dist.group.WORLD else group
            guard.run("teardown", events.group_ends, ending)
            original(group)

        return destroy

    for module in (dist, distributed_c10d):
        patches.replace(module, "destroy_process_group", wrap)
