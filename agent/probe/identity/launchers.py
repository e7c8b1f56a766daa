"""How the ranks of a job are placed on its nodes, from the launcher's environment variables."""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mp_agent.inputs.addresses import is_loopback

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
    """Where a rank stands on its node, and which node that is."""

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
    """A rank that `srun` started by itself."""

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
