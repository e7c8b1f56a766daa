"""Checks of shared memory, and of the runs on this machine."""

import os
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mp_agent.doctor.machine import CheckResult, FoundRun, Machine, ok, unknown, wrong
from mp_agent.inputs.addresses import DEFAULT_PORT
from mp_agent.report.numbers import size
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
            f"{path} has {size(free_bytes)} free: rings, of some MiB for each rank, reserve their "
            "space when they are made",
            "make the shared memory larger, in Docker by --shm-size, in Kubernetes by an emptyDir "
            "with medium: Memory",
        )
    else:
        yield ok(f"{path} has {size(free_bytes)} free")


_LOG_BYTES_MAX = 1 << 16
_LOG_LINES_MAX = 3
_WARNING = " WARNING "
_TROUBLE = (_WARNING, " ERROR ", " CRITICAL ")
_CONDITION = " condition="
_CONNECT_SECONDS = 1.0
_STARTERS = {
    "spawn": "local rank 0 starts it, and gives up after three deaths: see the job's log",
    "external": "start `mp-agent node` as the user who trains, with the same MP_AGENT_DIR",
    "none": "set MP_AGENT_NODE_AGENT to spawn or external",
}


def runs(machine: Machine) -> Iterator[CheckResult]:
    """Report the runs and ranks on this node."""
    for run in machine.runs:
        if run.ranks:
            yield _ranks_of(run)
    if any(run.ranks for run in machine.runs):
        return
    which = f"run {machine.run!r}" if machine.run else "no run"
    text = f"{which} is {'not ' if machine.run else ''}in {machine.settings.dir}"
    if machine.scrape or machine.resident is not None:
        yield unknown(text, "a node agent waits for jobs" if machine.resident else "")
    else:
        yield wrong(
            text,
            "call mp_agent.init() in the script, or start it by `mp-agent run`; rings appear with "
            "the first step; call doctor as the same user, with the same MP_AGENT_DIR, in the "
            "same container",
        )


def _ranks_of(run: FoundRun) -> CheckResult:
    states = Counter("alive" if rank.alive else "gone" for rank in run.ranks)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    text = f"run {run.name}: ranks on this node: {counted}"
    return ok(text) if run.alive else unknown(text, "the run is over; its last state lingers")


def rings(machine: Machine) -> Iterator[CheckResult]:
    """Report rings that cannot be read."""
    refused = [reason for run in machine.runs for reason in run.refused]
    for reason in refused:
        yield wrong(
            reason,
            "of another version: install one version of mp-agent in trainer and node agent; "
            "of another user: let both run as one",
        )
    if not refused:
        yield ok("every ring can be read")


def agents(machine: Machine) -> Iterator[CheckResult]:
    """Check that each run has a node agent."""
    for run in machine.runs:
        if run.agent_alive and run.status is None:
            yield unknown(f"run {run.name}: its node agent has not written its status yet")
        elif run.agent_alive and run.status is not None:
            yield ok(f"run {run.name}: its node agent is alive, pid {run.status.pid}")
        elif run.alive:
            yield wrong(
                f"run {run.name}: no node agent watches it", _STARTERS[machine.settings.node_agent]
            )
        else:
            yield unknown(f"run {run.name}: left behind by a job that is gone")
    if machine.resident is not None:
        yield ok(f"a node agent waits for jobs, pid {machine.resident.pid}")
    elif not machine.runs:
        yield unknown("no run, so no node agent is expected")


def log_files(machine: Machine) -> Iterator[CheckResult]:
    """Show the last warnings in the logs of detached node agents."""
    names = [run.directory.name for run in machine.runs]
    paths = [machine.settings.log_dir / f"{name}.log" for name in names]
    shown = [path for path in paths if path.is_file()]
    for path in shown:
        lines = _warnings(path)
        for line in lines:
            # The log does not show whether the cause of a warning persists.
            result = unknown if _WARNING in line else wrong
            yield result(f"{path}: {line}", "read the whole file")
        if not lines:
            yield ok(f"{path} holds no warning")
    if not shown:
        yield unknown(f"no log of a run in {machine.settings.log_dir}")


def _warnings(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES_MAX))
            lines = file.read(_LOG_BYTES_MAX).decode("utf-8", "replace").splitlines()
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    # Conditions concern the training, not the telemetry.
    own = [line for line in lines if _CONDITION not in line]
    return [line for line in own if any(mark in line for mark in _TROUBLE)][-_LOG_LINES_MAX:]


def port(machine: Machine) -> Iterator[CheckResult]:
    """Detect a port that another program uses, and node agents without a port."""
    wanted = machine.settings.port or DEFAULT_PORT
    for status in machine.agents:
        if not status.port and "prometheus" in machine.settings.exporters:
            yield wrong(
                f"the node agent with pid {status.pid} serves no port",
                "its log says why: a port that is in use, or contradictory TLS settings",
            )
    ours = {status.port for status in machine.agents} - {0}
    if wanted in ours or machine.settings.port == 0:
        yield ok(f"serving on {', '.join(map(str, sorted(ours))) or 'no port yet'}")
    elif _is_in_use(wanted):
        moved = ", ".join(map(str, sorted(ours)))
        yield wrong(
            f"port {wanted} is another program's" + (f"; ours is {moved}" if moved else ""),
            "set MP_AGENT_PORT to a free port and let Prometheus scrape that one",
        )
    elif ours:
        yield wrong(
            f"the node agent serves on {', '.join(map(str, sorted(ours)))}, not on {wanted}",
            "another program had the port when the agent started: let Prometheus find the agents "
            "by sd_dir or /sd, or set MP_AGENT_PORT",
        )
    else:
        yield unknown(f"port {wanted} is free: no node agent has it")


def _is_in_use(port: int) -> bool:
    for host in ("127.0.0.1", "::1"):
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError:
            continue
        return True
    return False
