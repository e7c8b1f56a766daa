"""Names of runs and launches, equal on all ranks of one, and different from others'."""

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from mp_agent.inputs.addresses import is_loopback
from mp_agent.probe.identity.launchers import SlurmTask
from mp_agent.probe.processes.process_table import boot_id, start_ticks
from mp_agent.probe.processes.store import listener_inode
from mp_agent.ring.interruptions import pass_on


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
    belongs to the name. Lightning's rank 0 starts the others itself: what these have in common is
    the store that rank 0 keeps. The first process of a container has no parent.
    """
    if task is not None and task.job:
        return _short_name(f"{task.name}:{task.restarts}:{task.place.node_rank}")
    if store := _own_store(environ):
        return _short_name(f"{boot_id()}:store:{store}")
    pid = (os.getppid() if world_size > 1 else 0) or os.getpid()
    return _short_name(f"{boot_id()}:{pid}:{start_ticks(pid)}")


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
