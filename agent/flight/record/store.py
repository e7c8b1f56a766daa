"""Stores flight records, within bounds on their number and size.

::

    <flight_dir>/<run>/<timestamp>-<reason>/node<k>.npz      one file per node

On a shared file system the nodes' files of one record share a directory. Each node applies the
bounds to its own files, and touches no other node's.
"""

import logging
import os
import stat
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from re import sub

from mp_agent.flight.record.archive import write_archive
from mp_agent.flight.record.budget import within
from mp_agent.records.flight import NodeRecord
from mp_agent.ring.files import make_private_directory
from mp_agent.ring.locations import run_directory

log = logging.getLogger("mp_agent.flight")

_FILE_MODE = 0o600
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REASON_CHARACTERS_MAX = 60


def record_name(time_unix_seconds: float, reason: str) -> str:
    """Return the name of a record, which sorts by time and contains the reason."""
    moment = datetime.fromtimestamp(time_unix_seconds, timezone.utc)
    milliseconds = moment.microsecond // 1000
    legible = sub(r"[^A-Za-z0-9]+", "-", reason)[:_REASON_CHARACTERS_MAX].strip("-") or "unnamed"
    return f"{moment:%Y%m%dT%H%M%S}.{milliseconds:03d}Z-{legible}"


def records_directory(flight_dir: Path, run: str) -> Path:
    """Return the directory of all records of a run."""
    return run_directory(flight_dir, run)


def write_record(flight_dir: Path, record: NodeRecord, *, records_max: int, bytes_max: int) -> Path:
    """Write a node's record, remove older ones beyond the bounds, and return its file.

    The file gets its name once it is complete. Raises OSError when it cannot be written, RingError
    when its directory belongs to another user; then no part of it remains, and older records stay.
    """
    run_dir = records_directory(flight_dir, record.run)
    directory = run_dir / record.request.name
    file = f"node{record.node_rank}.npz"
    _make_directory(directory)
    hidden = directory / f".{file}.{os.getpid()}"
    try:
        hidden.unlink(missing_ok=True)
        with os.fdopen(os.open(hidden, _FLAGS, _FILE_MODE), "wb") as opened:
            write_archive(opened, within(record, bytes_max))
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(hidden, directory / file)
    except BaseException:
        hidden.unlink(missing_ok=True)
        _remove_empty(directory)
        _remove_empty(run_dir)
        raise
    _prune(run_dir, file, keep=directory, records_max=records_max, bytes_max=bytes_max)
    return directory / file


def _make_directory(directory: Path) -> None:
    """Make the directory; below a world-writable one, all of it must belong to this user."""
    if any(_writable_by_all(above) for above in directory.parents):
        make_private_directory(directory)
    else:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _writable_by_all(directory: Path) -> bool:
    try:
        return bool(directory.stat().st_mode & stat.S_IWOTH)
    except FileNotFoundError:
        return False


def _prune(run_dir: Path, file: str, *, keep: Path, records_max: int, bytes_max: int) -> None:
    """Remove this node's oldest files until the rest is within the bounds."""
    with suppress(OSError):
        for stale in run_dir.glob(f"*/.{file}.*"):
            stale.unlink(missing_ok=True)
    found = sorted(run_dir.glob(f"*/{file}"), key=lambda path: path.parent.name)
    sizes = {path: _size(path) for path in found}
    for path in found:
        if len(sizes) <= max(records_max, 1) and sum(sizes.values()) <= bytes_max:
            return
        if path.parent == keep:
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("flight record %s cannot be removed: %s", path, error.strerror)
            continue
        del sizes[path]
        _remove_empty(path.parent)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()
