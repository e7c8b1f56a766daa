"""The sums over all ranks on which every rank decides alike."""

from collections.abc import Callable

import torch
import torch.distributed as dist


class Agreement:
    """Adds numbers up over the ranks of a process group, the job's own unless one is given.

    The collective is part of the stream of the training's own ones. Where a member is dead it
    fails or waits as the next one of the training does, no longer than the group's time-out.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup | None] = lambda: None) -> None:
        """group: returns the group; None for the job's own."""
        self._group = group

    @property
    def ranks(self) -> int:
        """How many ranks agree: 1 without a process group."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group())

    def sums(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sums over all ranks, on the same device."""
        if self.ranks == 1:
            return numbers
        group = self._group()
        device = _device_for(numbers.device, group)
        sent = numbers.to(device, copy=True)
        dist.all_reduce(sent, group=group)
        return sent.to(numbers.device)


def _device_for(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Return `device`, or the GPU where the group has no backend for gradients on the host."""
    backend = dist.get_backend_config(group)
    if device.type == "cpu" and "cpu:" not in backend and backend != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return device
