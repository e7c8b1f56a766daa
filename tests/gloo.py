"""The end of a job whose ranks have trained over gloo."""

import time
from collections.abc import Callable

import torch.distributed as dist

_RELEASE_SECONDS = 0.3
"""Within which gloo's threads release the tensors of the last collectives."""


def end_process_group(destroy: Callable[[], object] = dist.destroy_process_group) -> None:
    """Destroy the process group once gloo's threads are idle.

    Whoever drops the last reference to the group, as the destructor of a DDP model may, waits for
    these threads with the GIL held, while they may be waiting for the GIL to release a tensor: such
    a job ends never, or by a signal (torch 2.13).
    """
    time.sleep(_RELEASE_SECONDS)
    destroy()
