"""Where the files of a run are, and the small ones that rank and node agent share.

::

    <base>/<run>/                          one directory per run
        agent.lock                         held by the node agent while it lives
        agent.json                         AgentStatus
        ledger.json                        counters, kept by the node agent
        root.json                          RootNote, on runs of several nodes
        conditions.json                    ConditionNews, once there are any
        <launch>-<attempt>/rank<r>.ring    one ring per local rank
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from mp_agent.errors import RingError
from mp_agent.records.schema import RankIdentity
from mp_agent.ring.files import (
    is_locked,
    open_and_lock,
    open_private,
    read_private,
    replace_atomically,
)
from mp_agent.ring.interruptions import pass_on

_SLUG_CHARACTERS_MAX = 48
_HASH_CHARACTERS = 8
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_RUN_NAME = re.compile(rf".+-[0-9a-f]{{{_HASH_CHARACTERS}}}")
_RING_NAME = re.compile(r"rank(\d+)\.ring")
_STATUS_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """The state that a node agent publishes."""

    pid: int
    host: str
    port: int
    """0 when it serves nothing."""
    url: str
    scrapes_total: int
    final_exported: bool
    """Whether the state in which all local ranks have ended was exported."""
    started_unix_ns: int
    otlp_pending: bool = False
    """Whether that state is still to be pushed by OTLP; true from the start if it will be."""
    advertise: str = ""
    """Name or address that was set for this node, or the only one that is listened on."""
    pushes_total: int = 0
    """Reports that the root agent accepted."""
    final_pushed: bool = False
    """Whether the root agent accepted the state in which all local ranks have ended."""


def run_directory(base: Path, run: str) -> Path:
    """Return the directory of a run; two runs never share one, whatever their names hold."""
    return base / _slug(run)


def ring_path(run_dir: Path, identity: RankIdentity) -> Path:
    """Return the ring of one rank in one attempt."""
    return run_dir / f"{_slug(identity.launch)}-{identity.attempt}" / f"rank{identity.rank}.ring"


def agent_lock_path(run_dir: Path) -> Path:
    """Return the file whose lock the node agent of a run holds."""
    return run_dir / "agent.lock"


def agent_status_path(run_dir: Path) -> Path:
    """Return the file in which the node agent of a run describes itself."""
    return run_dir / "agent.json"


def ledger_path(run_dir: Path) -> Path:
    """Return the file in which the node agent of a run keeps its counters."""
    return run_dir / "ledger.json"


def find_runs(base: Path) -> list[Path]:
    """Return the run directories in `base`, by name; none when it cannot be read."""
    return [path for path in _directories(base) if _RUN_NAME.fullmatch(path.name)]


def find_rings(run_dir: Path) -> list[Path]:
    """Return the rings of all attempts of a run, by attempt directory and rank."""
    found: list[tuple[str, int, Path]] = []
    for attempt in _directories(run_dir):
        for path in _entries(attempt):
            if match := _RING_NAME.fullmatch(path.name):
                found.append((attempt.name, int(match[1]), path))
    return [path for _, _, path in sorted(found)]


def launch_origin(launch: str) -> str:
    """Return the name under which the ranks of a launch first made rings.

    Those that begin again, in the same processes or under a launcher that leaves no sign of it, add
    a number to it.
    """
    return launch.partition("-")[0]


def is_live(ring: Path) -> bool:
    """Return whether the process that writes a ring lives.

    Never to be called in that process: closing the file would drop its lock.
    """
    try:
        fd = open_private(ring)
    except (OSError, RingError):
        return False
    try:
        return is_locked(fd)
    except OSError:
        return False
    finally:
        os.close(fd)


def other_jobs(run_dir: Path, identity: RankIdentity) -> list[str]:
    """Return the attempt directories of a run in which other launches' ranks live.

    Never opens a ring of this launch: closing it would drop the lock of a rank in this process.
    """
    own = ring_path(run_dir, identity).parent
    prefix = f"{launch_origin(identity.launch)}-"
    others = {ring.parent for ring in find_rings(run_dir) if ring.parent != own}
    return [
        other.name
        for other in sorted(others)
        if not other.name.startswith(prefix) and any(map(is_live, _entries(other)))
    ]


def read_status(run_dir: Path) -> AgentStatus | None:
    """Return the state that the node agent last published, or None when there is no valid one."""
    content = read_private(agent_status_path(run_dir), _STATUS_BYTES_MAX)
    try:
        status = None if content is None else msgspec.json.decode(content, type=AgentStatus)
    except (msgspec.MsgspecError, RecursionError) as error:
        pass_on(error)
        return None
    return status if status is not None and 0 <= status.port < 1 << 16 else None


def write_status(run_dir: Path, status: AgentStatus) -> None:
    """Publish the state of a run's node agent. Raises OSError when it cannot be written."""
    content = json.dumps(asdict(status)).encode()
    replace_atomically(agent_status_path(run_dir), content)


def agent_running(run_dir: Path) -> bool:
    """Return whether a node agent holds the run's lock."""
    try:
        fd = open_private(agent_lock_path(run_dir))
    except (OSError, RingError) as error:
        pass_on(error)
        return False
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


def hold_agent_lock(run_dir: Path) -> int | None:
    """Acquire the run's lock, held until the returned fd and its copies are closed.

    Returns None when another process, or this one, holds it. Raises OSError when the lock file
    cannot be made, RingError when it is foreign.
    """
    return open_and_lock(agent_lock_path(run_dir))


def _slug(name: str) -> str:
    """Return a short file name for `name`: what is legible of it, and a hash of all of it."""
    legible = _UNSAFE.sub("-", name)[:_SLUG_CHARACTERS_MAX].strip(".-") or "unnamed"
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{legible}-{digest[:_HASH_CHARACTERS]}"


def _directories(directory: Path) -> list[Path]:
    # A path object per entry, and a look at each, would be a twentieth of a node agent's time.
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        pass_on(error)
        return []
    return [directory / name for name in sorted(names)]


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        pass_on(error)
        return []
