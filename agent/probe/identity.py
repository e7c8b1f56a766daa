"""Who this process is: run, attempt, launch and rank, from the launcher's environment."""

import hashlib
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from mp_agent.probe.members import Members
from mp_agent.records.schema import RankIdentity
from mp_agent.version import __version__

_RANK_VARIABLES = ("RANK", "WORLD_SIZE")


def ranks_are_known(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether rank and world size can be told already, before the first step."""
    return all(name in environ for name in _RANK_VARIABLES) or _group_exists()


def make_identity(
    run: str = "", environ: Mapping[str, str] = os.environ, members: Members | None = None
) -> RankIdentity:
    """Return this process's identity; `run` is the setting, "" derives a name.

    torchrun's variables win over the default process group, which wins over a world of one.
    `members`, if any, are the only ranks of the run.
    """
    rank, world_size = _rank_and_world_size(environ)
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", world_size)
    launcher = _launcher_name(world_size)
    identity = RankIdentity(
        run=run or _run_name(environ, launcher),
        attempt=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        launch=_launch_name(environ, launcher),
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK", rank % local_world_size),
        local_world_size=local_world_size,
        node_rank=_integer(environ, "GROUP_RANK", rank // local_world_size),
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
    if all(name in environ for name in _RANK_VARIABLES):
        return _integer(environ, "RANK", 0), _integer(environ, "WORLD_SIZE", 1)
    if _group_exists():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        return default


def _run_name(environ: Mapping[str, str], launcher: str) -> str:
    """Return torchrun's rendezvous id, else the scheduler's job, else a name of this launcher."""
    rendezvous_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    if rendezvous_id not in ("", "none"):
        return rendezvous_id
    if job := environ.get("SLURM_JOB_ID"):
        return f"slurm-{job}"
    pod, index = environ.get("HOSTNAME", ""), environ.get("JOB_COMPLETION_INDEX")
    if index and re.search(rf"-{index}(-\w+)?$", pod):
        return re.sub(rf"-{index}(-\w+)?$", "", pod)
    return f"{_script_name()}-{launcher}"


def _script_name() -> str:
    return Path(sys.argv[0] if sys.argv else "").stem or "python"


def _launcher_name(world_size: int) -> str:
    """Return a short name that all local ranks of one launcher share and those of no other have.

    Local ranks have the launcher as their common parent; a process id alone comes round again,
    so the parent's start time belongs to the name.
    """
    pid = os.getppid() if world_size > 1 else os.getpid()
    return _short_name(f"{_boot_id()}:{pid}:{_start_ticks(pid)}")


def _launch_name(environ: Mapping[str, str], launcher: str) -> str:
    """Return a short name that the local ranks have that the launcher started at the same time.

    An elastic launcher starts all its ranks again when nodes join or leave, perhaps under other
    numbers, and its restart count stays as it was. What differs then is the group, and how old the
    directory is that torchrun makes anew for the logs of each start.
    """
    group = (environ.get("WORLD_SIZE", ""), environ.get("GROUP_RANK", ""))
    return _short_name(f"{launcher}:{':'.join(group)}:{_log_directory_unix_ns(environ)}")


def _log_directory_unix_ns(environ: Mapping[str, str]) -> int:
    """Return when torchrun last put something into `<log dir>/<run>/attempt_<n>`; 0: no such.

    It does so before it starts the ranks, and afterwards only in the ranks' own directories.
    """
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        return Path(error_file).parent.parent.stat().st_mtime_ns if error_file else 0
    except OSError:
        return 0


def _short_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:10]


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _start_ticks(pid: int) -> str:
    """Return field 22 of /proc/<pid>/stat; field 2 may itself hold spaces and parentheses."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()[19]
