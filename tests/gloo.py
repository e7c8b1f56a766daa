"""The ranks of a job that train over gloo, and their end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_RELEASE_SECONDS = 0.3
"""Within which gloo's threads release the tensors of the last collectives."""


@contextmanager
def process_group(
    directory: Path, rank: int, ranks: int, *, timeout_seconds: float = 300.0
) -> Iterator[None]:
    """Be one of the ranks that meet in a file of `directory`, on one thread; all end together."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_seconds),
    )
    yield
    dist.barrier()
    end_process_group()


def end_process_group(destroy: Callable[[], object] = dist.destroy_process_group) -> None:
    """Destroy the process group once gloo's threads are idle.

    The code that drops the last reference to the group, as the destructor of a DDP model may, waits
    for these threads with the GIL held, while they may be waiting for the GIL to release a tensor:
    such a job ends never, or by a signal (torch 2.13).
    """
    time.sleep(_RELEASE_SECONDS)
    destroy()
