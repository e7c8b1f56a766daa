"""Who a rank is: its run, job and attempt, from the launcher and the processes around it."""

import hashlib
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from mp_agent.errors import RingError
from mp_agent.inputs.addresses import is_loopback
from mp_agent.inputs.files import printable
from mp_agent.probe.processes.launchers import (
    Members,
    SlurmTask,
    integer,
    listener_inode,
    node_place,
    slurm_task,
)
from mp_agent.records.schema import RankIdentity
from mp_agent.ring import locations
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.reader import RingReader
from mp_agent.version import __version__

_ANCESTORS_MAX = 32
_PARENT_FIELD, _START_FIELD = 1, 19
"""Of /proc/<pid>/stat, counted after the name."""


def boot_id() -> str:
    """Return the boot id of the machine; "" where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_ticks(pid: int) -> str:
    """Return when a process was started; "" when that cannot be known."""
    return _stat_field(pid, _START_FIELD)


def ancestors() -> Iterator[int]:
    """Yield the process ids above this one, the parent first, as far as they can be seen."""
    pid = os.getppid()
    for _ in range(_ANCESTORS_MAX):
        if pid <= 0:
            return
        yield pid
        pid = int(_stat_field(pid, _PARENT_FIELD) or 0)


def _stat_field(pid: int, field: int) -> str:
    """Return a field of /proc/<pid>/stat; its name may itself hold spaces and parentheses."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[field]
    except (OSError, IndexError):
        return ""


def is_helper(
    identity: RankIdentity, directory: Path, *, asked_for: bool, numbered_by_environment: bool
) -> bool:
    """Return whether this process is no rank of its own, but a data worker or similar.

    A process group of its own makes a process a rank. One without has its rank's number only by
    inheritance where a rank above it has the same; a child of multiprocessing helps the rank above
    it, or is a daemon, unless `init()` was called for it (asked_for). directory: the setting `dir`.
    """
    if get_worker_info() is not None:
        return True
    if dist.is_available() and dist.is_initialized():
        return False
    is_child = multiprocessing.parent_process() is not None
    if numbered_by_environment and any(
        (above.rank, above.world_size) == (identity.rank, identity.world_size)
        for above in _ranks_above(directory)
    ):
        return True
    if asked_for or not is_child:
        return False
    return multiprocessing.current_process().daemon or any(_ranks_above(directory))


def _ranks_above(directory: Path) -> Iterator[RankIdentity]:
    """Yield the ranks among the processes above this one."""
    above = set(ancestors())
    if (parent := multiprocessing.parent_process()) is not None:
        above.add(parent.pid or 0)  # a fork server may be in between
    for run_dir in locations.find_runs(directory):
        for path in locations.find_rings(run_dir):
            try:
                reader = RingReader.open(path)
            except (OSError, RingError):
                continue
            with closing(reader):
                if (pid := reader.writer_pid()) and pid in above:
                    yield reader.identity


def run_name(
    environ: Mapping[str, str], launcher: str, task: SlurmTask | None, *, several_nodes: bool
) -> str:
    """Return torchrun's rendezvous id, else the scheduler's job, else a name of this start.

    Where ranks of other nodes must come to the same name, it cannot hold what is this node's own.
    """
    rendezvous_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    if rendezvous_id not in ("", "none"):
        return rendezvous_id
    if task is not None and task.job:
        return f"slurm-{task.name}"
    if job := environ.get("SLURM_JOB_ID"):
        # A batch script may start several runs at the same time.
        return f"slurm-{job}" if several_nodes else f"slurm-{job}-{launcher}"
    pod, index = environ.get("HOSTNAME", ""), environ.get("JOB_COMPLETION_INDEX")
    # Kubernetes' index is a number; anything else there has another meaning.
    if index and index.isdecimal() and re.search(rf"-{index}(-\w+)?$", pod):
        return re.sub(rf"-{index}(-\w+)?$", "", pod)
    if several_nodes and (master := environ.get("MASTER_ADDR")):
        # Where the ranks meet is this job's alone, as long as it lasts. Some operators give the
        # pod of rank 0 another name for itself.
        master = pod or master if is_loopback(master) else master
        meeting_point = f"{master}:{environ.get('MASTER_PORT', '')}"
        return f"{_script_name()}-{_short_name(meeting_point)}"
    return f"{_script_name()}-{launcher}"


def launcher_name(
    world_size: int, task: SlurmTask | None, environ: Mapping[str, str] = os.environ
) -> str:
    """Return a short name that all local ranks of one launcher share and those of no other have.

    Local ranks have the launcher as their common parent, but not always under `srun`, which may
    start a shell for each; a process id alone comes round again, so the parent's start time
    belongs to the name, and the PID namespace: containers that start together have equal numbers.
    Lightning's rank 0 starts the others itself: what these have in common is the store that rank 0
    keeps. The first process of a container has no parent.
    """
    if task is not None and task.job:
        return _short_name(f"{task.name}:{task.restarts}:{task.place.node_rank}")
    if store := _own_store(environ):
        return _short_name(f"{boot_id()}:store:{store}")
    pid = (os.getppid() if world_size > 1 else 0) or os.getpid()
    return _short_name(f"{boot_id()}:{_pid_namespace()}:{pid}:{start_ticks(pid)}")


def launch_name(environ: Mapping[str, str], launcher: str) -> str:
    """Return a short name that the local ranks have that the launcher started at the same time.

    An elastic launcher starts all its ranks again when nodes join or leave, perhaps under other
    numbers, and its restart count stays as it was. What differs then is the group, and how old the
    directory is that torchrun creates for the logs of each start.
    """
    group = (environ.get("WORLD_SIZE", ""), environ.get("GROUP_RANK", ""))
    return _short_name(f"{launcher}:{':'.join(group)}:{_log_directory_unix_ns(environ)}")


def _own_store(environ: Mapping[str, str]) -> str:
    """Return the name of the store that a launcher on this machine keeps; "" for none."""
    if "RANK" in environ or "LOCAL_WORLD_SIZE" in environ or "LOCAL_RANK" not in environ:
        return ""
    port = environ.get("MASTER_PORT", "")
    return listener_inode(int(port)) if port.isdecimal() else ""


def _script_name() -> str:
    return Path(sys.argv[0] if sys.argv else "").stem or "python"


def _log_directory_unix_ns(environ: Mapping[str, str]) -> int:
    """Return when torchrun last put something into `<log dir>/<run>/attempt_<n>`; 0: no such.

    It does so before it starts the ranks, and afterwards only in the ranks' own directories.
    """
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        return Path(error_file).parent.parent.stat().st_mtime_ns if error_file else 0
    except OSError as error:
        pass_on(error)
        return 0


def _short_name(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:10]


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
        # Part of alerts, which mails and pages show as they are.
        run=printable(
            run.strip() or run_name(environ, launcher, task, several_nodes=several_nodes)
        ),
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
