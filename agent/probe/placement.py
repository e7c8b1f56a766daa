"""Which share of a tensor this rank holds: shard and replica, told by what wraps the parameter.

A share's group is named by the ranks that hold the tensor and by how it is laid out over them, so
that it reads the same on all of them, and differently for another pipeline stage or expert.
"""

import hashlib
import os
from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from mp_agent.records.schema import Share

_RANGES_AT_MOST = 8

ALONE = Share(group="single")
UNWRAPPED = Share(group="unwrapped", assumed=True)
"""Of parameters under a world size > 1 that nothing known wraps; the merge judges by digests."""


def world_size() -> int:
    """Return the number of ranks: of the default process group, else as torchrun says, else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def share_of(
    parameter: torch.Tensor, wrapper: DistributedDataParallel | None, ranks_in_run: int
) -> Share | None:
    """Return this rank's share of `parameter`; None when no statistic of its part would mean much.

    `wrapper` is the DistributedDataParallel around the parameter, if any. Enters no collective.
    """
    if isinstance(parameter, DTensor):
        return _share_of_dtensor(parameter)
    if ranks_in_run == 1:
        return ALONE
    if wrapper is None:
        return UNWRAPPED
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    return Share(
        group=f"replicate over ranks {describe_ranks(ranks)}",
        replica_index=dist.get_rank(wrapper.process_group),
        replica_count=len(ranks),
    )


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as `0-3,6`; very scattered ones as a digest, which is as good a name."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    if len(ranges) > _RANGES_AT_MOST:
        return hashlib.sha256(repr(ranges).encode()).hexdigest()[:16]
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _share_of_dtensor(parameter: DTensor) -> Share | None:
    mesh, placements = parameter.device_mesh, parameter.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in placements):
        return None
    # is_shard() is false of _StridedShard (FSDP2 over tensor parallelism), which is a shard too.
    sharded = [not placement.is_replicate() for placement in placements]
    shard_index, shard_count = _flatten(mesh, coordinate, sharded)
    replica_index, replica_count = _flatten(mesh, coordinate, [not is_on for is_on in sharded])
    return Share(
        group=_group_name(mesh, placements),
        shard_index=shard_index,
        shard_count=shard_count,
        replica_index=replica_index,
        replica_count=replica_count,
    )


def _flatten(
    mesh: DeviceMesh, coordinate: Sequence[int], chosen: Sequence[bool]
) -> tuple[int, int]:
    """Return this rank's index along the chosen mesh dimensions taken as one, and its extent."""
    index = 0
    for dimension, position in enumerate(coordinate):
        if chosen[dimension]:
            index = index * mesh.size(dimension) + position
    return index, prod(mesh.size(dim) for dim, is_on in enumerate(chosen) if is_on)


def _group_name(mesh: DeviceMesh, placements: Sequence[Placement]) -> str:
    shape = "x".join(str(mesh.size(dimension)) for dimension in range(mesh.ndim))
    layout = " ".join(_describe_placement(placement) for placement in placements)
    return f"{layout} over mesh {shape} of ranks {describe_ranks(mesh.mesh.flatten().tolist())}"


def _describe_placement(placement: Placement) -> str:
    return "replicate" if placement.is_replicate() else f"shard({getattr(placement, 'dim', '?')})"
