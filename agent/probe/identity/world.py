"""Where this rank stands among all ranks of the job, and short names for sets of ranks."""

import hashlib
import os
from collections.abc import Iterable

import torch.distributed as dist

from mp_agent.probe.identity.launchers import integer

_RANGES_AT_MOST = 8


def world_size() -> int:
    """Return the number of ranks: of the default process group, else as torchrun says, else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return integer(os.environ, "WORLD_SIZE", 1)


def this_rank() -> int:
    """Return this process's rank, from where `world_size` has its number."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return integer(os.environ, "RANK", 0)


def describe_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as `0-3,6`; very scattered ones as a digest."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    if len(ranges) > _RANGES_AT_MOST:
        return hashlib.sha256(repr(ranges).encode()).hexdigest()[:16]
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
