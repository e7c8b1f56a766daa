"""The launcher of the job, its process group, and the job's store."""

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mp_agent.errors import SettingError
from mp_agent.inputs.addresses import is_loopback
from mp_agent.records.schema import RankIdentity

log = logging.getLogger("mp_agent")

_LAUNCHERS = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),  # torchrun, and launchers that follow it
    ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"),  # DeepSpeed
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""),  # Open MPI
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),  # MPICH, Intel MPI
)
"""Names of local rank, local ranks and node, in order of precedence."""

_TASKS = re.compile(r"(\d{1,7})(?:\(x(\d{1,7})\))?")
_RANKS_MAX = 2**20


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a rank is on its node, and which node that is."""

    local_rank: int
    local_world_size: int
    node_rank: int

    def fits(self, rank: int, world_size: int) -> bool:
        """Return whether this can be the place of a rank."""
        return 0 <= self.local_rank < self.local_world_size <= world_size and (
            self.local_rank <= rank and self.node_rank >= 0
        )


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """A rank that `srun` started alone."""

    job: str
    step: str
    restarts: int
    """How often the job was requeued."""
    place: NodePlace

    @property
    def name(self) -> str:
        """What Slurm calls the tasks that belong together: job and step."""
        return f"{self.job}.{self.step}" if self.step else self.job


def node_place(rank: int, world_size: int, environ: Mapping[str, str]) -> NodePlace:
    """Return where a rank runs; as on a single node where no launcher says.

    That there are more may show all the same: then it is logged what to set. A pod that has just
    its rank, the number of ranks and another pod's address is a node with one rank.
    """
    for place in _places(rank, world_size, environ):
        if place.fits(rank, world_size):
            return place
    if world_size > 1 and _is_alone(environ):
        return NodePlace(0, 1, rank)
    local_rank = integer(environ, "LOCAL_RANK", rank)
    if local_rank == 0 < rank:
        log.warning(
            "nodes cannot be distinguished: set LOCAL_WORLD_SIZE and GROUP_RANK for every rank"
        )
    return NodePlace(local_rank if 0 <= local_rank <= rank else rank, world_size, 0)


def slurm_task(rank: int, world_size: int, environ: Mapping[str, str]) -> SlurmTask | None:
    """Return the Slurm task that is this rank.

    None where Slurm's tasks are not the ranks of the job, as when they are launchers of ranks; also
    in a world of one, which may be one of several that a batch script, a single task, has started.
    """
    tasks = integer(environ, "SLURM_STEP_NUM_TASKS", integer(environ, "SLURM_NTASKS", 0))
    if "LOCAL_WORLD_SIZE" in environ or not 1 < tasks == world_size:
        return None
    if integer(environ, "SLURM_PROCID", -1) != rank:
        return None
    node = integer(environ, "SLURM_NODEID", 0)
    place = NodePlace(
        local_rank=integer(environ, "SLURM_LOCALID", -1),
        local_world_size=_tasks_on(node, world_size, environ),
        node_rank=node,
    )
    return SlurmTask(
        job=environ.get("SLURM_JOB_ID", ""),
        step=environ.get("SLURM_STEP_ID", ""),
        restarts=integer(environ, "SLURM_RESTART_COUNT", 0),
        place=place,
    )


def integer(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable's number, or `default` when it has none."""
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        return default


def _is_alone(environ: Mapping[str, str]) -> bool:
    """Return whether this is the only rank in its container, as far as it shows."""
    if "RANK" not in environ or "LOCAL_RANK" in environ:
        return False
    if os.getppid() == 0:
        return True
    master = environ.get("MASTER_ADDR", "")
    return "KUBERNETES_SERVICE_HOST" in environ and bool(master) and not is_loopback(master)


def _places(rank: int, world_size: int, environ: Mapping[str, str]) -> Iterator[NodePlace]:
    for local_rank, local_world_size, node in _LAUNCHERS:
        size = integer(environ, local_world_size, 0)
        if size > 0:
            yield NodePlace(
                local_rank=integer(environ, local_rank, rank % size),
                local_world_size=size,
                node_rank=integer(environ, node, rank // size),
            )
    if (task := slurm_task(rank, world_size, environ)) is not None:
        yield task.place


def _tasks_on(node: int, world_size: int, environ: Mapping[str, str]) -> int:
    """Return how many tasks a step has on one of its nodes; 0 when that is unknown."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        tasks = _tasks_per_node(environ.get(name, ""))
        if sum(tasks) == world_size and 0 <= node < len(tasks):
            return tasks[node]
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        nodes = integer(environ, name, 0)
        if nodes > node >= 0 and world_size % nodes == 0:
            return world_size // nodes
    return integer(environ, "SLURM_NTASKS_PER_NODE", 0)


def _tasks_per_node(text: str) -> list[int]:
    """Return the numbers that `2(x3),1` stands for; none when it is something else."""
    tasks: list[int] = []
    for part in text.split(","):
        found = _TASKS.fullmatch(part)
        times = int(found[2] or 1) if found else 0
        if found is None or len(tasks) + times > _RANKS_MAX:
            return []
        tasks += [int(found[1])] * times
    return tasks


_RANGES_AT_MOST = 8


def world_size() -> int:
    """Return the number of ranks: of the default process group, else as torchrun says, else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    try:
        return int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 1


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


@dataclass(frozen=True, slots=True)
class Members:
    """Global ranks, ascending, that make a run of their own within a job.

    suffix: distinguishes the run's name from those of the job's other groups; empty when the group
    is the whole job, or has been given its own name.
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


_CONNECT_SECONDS = 10.0
_LISTENING = "0A"


class Store(Protocol):
    """What is used of `torch.distributed.TCPStore`; every method may raise RuntimeError."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def get(self, key: str) -> bytes:
        """Return a value; waits until there is one."""

    def check(self, keys: list[str]) -> bool:
        """Return whether there are values, without waiting."""


def connect(host: str, port: int) -> Store:
    """Return a client of the store that listens there. Raises RuntimeError after some seconds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=_CONNECT_SECONDS)
    return TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)


def is_listened_on(port: int) -> bool:
    """Return whether a process of this machine listens on a TCP port."""
    return bool(listener_inode(port))


def listener_inode(port: int) -> str:
    """Return the inode of the socket that listens on a TCP port of this machine; "" for none."""
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                return fields[9]
    return ""
