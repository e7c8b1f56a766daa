"""Who this process is: run, attempt, launch and rank, from the launcher's environment."""

import os
import socket
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from mp_agent.probe.identity.launchers import integer, node_place, slurm_task
from mp_agent.probe.identity.names import launch_name, launcher_name, run_name
from mp_agent.probe.identity.process_group import Members
from mp_agent.records.schema import RankIdentity
from mp_agent.version import __version__

_RANK_VARIABLES = ("RANK", "WORLD_SIZE")
_RANKS_MAX = 2**20
"""More ranks than any job has: a greater number is invalid."""


def ranks_are_numbered(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment has this process's rank and the number of ranks."""
    return all(name in environ for name in _RANK_VARIABLES)


def ranks_are_known(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether rank and world size are known already, before the first step."""
    return ranks_are_numbered(environ) or _group_exists()


def make_identity(
    run: str = "", environ: Mapping[str, str] = os.environ, members: Members | None = None
) -> RankIdentity:
    """Return this process's identity; `run` is the setting, "" derives a name.

    The variables RANK and WORLD_SIZE, if they make sense, win over the default process group, which
    wins over a world of one; but of a group that is as large as the world, the rank in it is the
    process's own. `members`, if any, are the only ranks of the run.
    """
    rank, world_size = _rank_and_world_size(environ)
    place = node_place(rank, world_size, environ)
    task = slurm_task(rank, world_size, environ)
    launcher = launcher_name(world_size, task, environ)
    several_nodes = world_size > place.local_world_size
    identity = RankIdentity(
        run=run or run_name(environ, launcher, task, several_nodes=several_nodes),
        attempt=integer(environ, "TORCHELASTIC_RESTART_COUNT", task.restarts if task else 0),
        launch=launch_name(environ, launcher),
        rank=rank,
        world_size=world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        created_unix_ns=time.time_ns(),
        torch_version=torch.__version__,
        version=__version__,
    )
    return identity if members is None else members.numbered(identity)


def _group_exists() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank_and_world_size(environ: Mapping[str, str]) -> tuple[int, int]:
    if ranks_are_numbered(environ):
        rank, world_size = integer(environ, "RANK", 0), integer(environ, "WORLD_SIZE", 1)
        if 0 <= rank < world_size <= _RANKS_MAX:
            # Children of one process inherit its RANK, or are given one by a library that assumes
            # it (accelerate on a CPU), whichever variables their launcher set.
            whole = _group_exists() and dist.get_world_size() == world_size
            return dist.get_rank() if whole else rank, world_size
    if _group_exists():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
