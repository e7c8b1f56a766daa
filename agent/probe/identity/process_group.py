"""The ranks of a run that is restricted to a process group or a mesh."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mp_agent.errors import SettingError
from mp_agent.probe.identity.world import describe_ranks, this_rank, world_size
from mp_agent.records.schema import RankIdentity


@dataclass(frozen=True, slots=True)
class Members:
    """Global ranks, ascending, that make a run of their own within a job.

    suffix: distinguishes the run's name from those of the job's other groups; empty when the group
    is the whole job, or has been given a name of its own.
    """

    ranks: tuple[int, ...]
    suffix: str = ""

    def numbered(self, identity: RankIdentity) -> RankIdentity:
        """Return the identity that a member has in the run, given the one it has in the job.

        Members are numbered in ascending order, those of a node among themselves too; nodes keep
        their numbers.
        """
        first = identity.rank - identity.local_rank
        node = range(first, first + identity.local_world_size)
        local = [rank for rank in self.ranks if rank in node]
        return replace(
            identity,
            run=identity.run + self.suffix,
            rank=self.ranks.index(identity.rank),
            world_size=len(self.ranks),
            local_rank=local.index(identity.rank),
            local_world_size=len(local),
        )


def members_of(process_group: object, *, named: bool) -> Members | None:
    """Return the members of a process group or mesh; None when this rank is not one of them.

    named: whether the run was given a name along with the group. Raises SettingError for
    anything that is neither.
    """
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if isinstance(process_group, dist.ProcessGroup):
        ranks = _ascending(dist.get_process_group_ranks(process_group))
    elif isinstance(process_group, DeviceMesh):
        ranks = _ascending(process_group.mesh.flatten().tolist())
    else:
        raise SettingError(
            f"process_group has value {process_group!r}: must be a process group or a device mesh"
        )
    if this_rank() not in ranks:
        return None
    whole = len(ranks) == world_size()
    return Members(ranks, "" if named or whole else f"-ranks{describe_ranks(ranks)}")


def group_of(process_group: object) -> dist.ProcessGroup | None:
    """Return the process group by which the members can agree; None for that of the whole job.

    Raises SettingError for a mesh of several dimensions that is only a part of the job.
    """
    if isinstance(process_group, DeviceMesh):
        if process_group.mesh.numel() == world_size():
            return None
        if process_group.ndim == 1:
            found: dist.ProcessGroup = process_group.get_group()
            return found
        raise SettingError(
            f"process_group has value {process_group!r}: with a guard or a reduction a mesh that "
            "is a part of the job must have one dimension"
        )
    return process_group if isinstance(process_group, dist.ProcessGroup) else None


def _ascending(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))
