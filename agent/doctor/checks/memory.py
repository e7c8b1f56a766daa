"""Checks of the directory in shared memory."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from mp_agent.doctor.check_result import CheckResult, ok, unknown, wrong
from mp_agent.doctor.machine import Machine
from mp_agent.ring.files import ROOM_BYTES

_TMPFS = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mounts")
_PROCESSES = Path("/proc")
_RING = ".ring"


def directory(machine: Machine) -> Iterator[CheckResult]:
    """Check owner, permissions, file system and free space of the setting `dir`."""
    path = machine.settings.dir
    try:
        status = path.lstat()
    except OSError as error:
        yield unknown(
            f"{path}: {error.strerror}",
            "no job of this user has begun here, or it has another MP_AGENT_DIR",
        )
        there = next((parent for parent in path.parents if parent.is_dir()), Path("/"))
        yield from _file_system(there)
        yield from _space(there)
        return
    if not stat.S_ISDIR(status.st_mode):
        yield wrong(f"{path} is no directory", "remove it, or set MP_AGENT_DIR to another place")
        return
    yield from _owner(path, status)
    yield from _file_system(path)
    yield from _space(path)


def removed_rings(machine: Machine) -> Iterator[CheckResult]:
    """Detect rings that a process of this user has open although their files are gone."""
    base = machine.settings.dir
    pids = [pid for pid in _own_processes() if _holds_a_removed_ring(pid, base)]
    if pids:
        shown = ", ".join(map(str, pids))
        yield wrong(
            f"rings in {base} were removed while processes have them open: pid {shown}",
            "set RemoveIPC=no in /etc/systemd/logind.conf, which otherwise empties /dev/shm when "
            "the user's last session ends; then restart the job",
        )
    else:
        yield ok("no ring was removed while a process has it open")


def _own_processes() -> Iterator[int]:
    for path in _PROCESSES.iterdir():
        if path.name.isdecimal():
            yield int(path.name)


def _holds_a_removed_ring(pid: int, base: Path) -> bool:
    try:
        return any(_is_removed_ring(fd, base) for fd in (_PROCESSES / str(pid) / "fd").iterdir())
    except OSError:
        # Another user's process, or one that has ended.
        return False


def _is_removed_ring(fd: Path, base: Path) -> bool:
    # A ring is created under a temporary name, so its link count matters, not its path.
    target = os.readlink(fd)
    return target.startswith(f"{base}/") and _RING in target and os.stat(fd).st_nlink == 0


def _owner(path: Path, status: os.stat_result) -> Iterator[CheckResult]:
    uid = os.geteuid()
    if status.st_uid not in (uid, 0):
        yield wrong(
            f"{path} belongs to uid {status.st_uid}, this process runs as {uid}",
            "let trainer and node agent run as one user, who owns the directory",
        )
    elif not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield wrong(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: uid {uid} cannot write into it",
            f"chmod u+rwx {path}, or recreate it as the user who trains",
        )
    elif status.st_mode & stat.S_IWOTH and status.st_uid == uid:
        yield wrong(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: everybody can put files there",
            f"chmod 700 {path}",
        )
    else:
        yield ok(f"{path} can be used by uid {uid}")


def _file_system(path: Path) -> Iterator[CheckResult]:
    kind = _kind_of(path.resolve())
    if kind in _TMPFS:
        yield ok(f"{path} lies in memory")
    elif kind:
        yield wrong(
            f"{path} lies on {kind}: every step writes to a disk",
            "set MP_AGENT_DIR to a directory on tmpfs, such as one in /dev/shm",
        )
    else:
        yield unknown(f"the file system of {path} is not known")


def _kind_of(path: Path) -> str:
    """Return the type of the file system that holds `path`; "" if unknown."""
    try:
        lines = _MOUNTS.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    holding = [
        (len(place), kind)
        for _, place, kind, *_ in map(str.split, lines)
        if path.is_relative_to(place.replace("\\040", " "))
    ]
    # Of several mounts at one place the last one is visible.
    return max(reversed(holding), key=lambda mount: mount[0])[1] if holding else ""


def _space(path: Path) -> Iterator[CheckResult]:
    free = os.statvfs(path)
    free_bytes = free.f_bavail * free.f_frsize
    if free_bytes < ROOM_BYTES:
        yield wrong(
            f"{path} has {_size(free_bytes)} free: rings, of some MiB for each rank, reserve their "
            "space when they are made",
            "make the shared memory larger, in Docker by --shm-size, in Kubernetes by an emptyDir "
            "with medium: Memory",
        )
    else:
        yield ok(f"{path} has {_size(free_bytes)} free")


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >> 20 else f"{size_bytes >> 10} KiB"
