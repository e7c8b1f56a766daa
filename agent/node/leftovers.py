"""Removes files that jobs left in shared memory when killed together with their node agents."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from mp_agent.errors import RingError
from mp_agent.node.flight.service import forget_requests
from mp_agent.node.run.launches import remove_ring
from mp_agent.node.run.ledger import read_ledger
from mp_agent.ring import locations
from mp_agent.ring.files import open_and_lock
from mp_agent.ring.reader import RingReader
from mp_agent.ring.run_files import conditions_path, root_note_path

log = logging.getLogger("mp_agent.node")

SUPERVISED_PREFIX = "exec-"
"""Prefix of the directories that `mp-agent exec` creates, one per job."""
QUIET_SECONDS = 2.0
"""A directory that has changed more recently may belong to a job that is starting."""
_ABANDONED_SECONDS = 60.0
"""A temporary file older than this is abandoned."""
_AGENTS_OWN = (".ledger.json.", ".agent.json.", ".conditions.json.", ".flight-answer.json.")
"""Prefixes of temporary files that only the node agent of the run creates."""


def clear_leftovers(base: Path) -> None:
    """Remove the runs in `base` without a live rank or node agent.

    They remain when Slurm or the kernel kills a whole job. Unread steps and errors are logged.
    """
    for run_dir in locations.find_runs(base):
        _contained(_clear_run, run_dir)
    for directory in _supervised(base):
        _contained(_clear_supervised, directory)
    _contained(_clear_announcement, base)


def hold_supervisor_lock(directory: Path) -> int | None:
    """Return an fd that locks the directory for its supervisor; None if another one holds it."""
    return open_and_lock(directory / "exec.lock")


def remove_files(run_dir: Path, rings: Iterable[Path]) -> None:
    """Remove the files of a run whose lock the caller holds; rings only without a live rank."""
    for path in rings:
        if not locations.is_live(path):
            remove_ring(path)
    for path in (
        locations.agent_status_path(run_dir),
        locations.ledger_path(run_dir),
        conditions_path(run_dir),
    ):
        unlink(path)
    try:
        forget_requests(run_dir)
    except OSError as error:
        log.warning("%s cannot be removed: %s", error.filename, error.strerror)
    for path in _abandoned_files(run_dir):
        unlink(path)
    for directory in _directories(run_dir):
        with suppress(OSError):
            directory.rmdir()


def unlink(path: Path) -> None:
    """Remove a file; a failure is logged."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error.strerror)


def remove_empty(directory: Path) -> None:
    """Remove a directory unless it has other contents."""
    try:
        directory.rmdir()
    except OSError as error:
        log.info("%s stays: %s", directory, error.strerror)


def _contained(clear: Callable[[Path], object], directory: Path) -> None:
    try:
        clear(directory)
    except (OSError, RingError, ValueError) as error:
        log.info("%s is not cleared: %s", directory, error)


def _clear_run(run_dir: Path) -> bool:
    """Remove a run unless it is alive or has just changed; return whether it is gone."""
    if _age_seconds(run_dir) < QUIET_SECONDS or _any_live(run_dir):
        return False
    lock_fd = locations.hold_agent_lock(run_dir)
    if lock_fd is None:
        return False
    try:
        if _any_live(run_dir):
            return False
        log.warning("cleared %s: %s", run_dir, _unread(run_dir))
        remove_files(run_dir, locations.find_rings(run_dir))
        unlink(root_note_path(run_dir))
        unlink(locations.agent_lock_path(run_dir))
    finally:
        os.close(lock_fd)
    remove_empty(run_dir)
    return not run_dir.exists()


def _clear_supervised(directory: Path) -> None:
    if _age_seconds(directory) < QUIET_SECONDS:
        return
    lock_fd = hold_supervisor_lock(directory)
    if lock_fd is None:
        return
    try:
        if all([_clear_run(run_dir) for run_dir in locations.find_runs(directory)]):
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock_fd)


def _clear_announcement(base: Path) -> None:
    """Remove the status of a resident node agent that was killed."""
    if not locations.agent_status_path(base).exists():
        return
    lock_fd = locations.hold_agent_lock(base)
    if lock_fd is None:
        return
    try:
        unlink(locations.agent_status_path(base))
        unlink(locations.agent_lock_path(base))
    finally:
        os.close(lock_fd)


def _any_live(run_dir: Path) -> bool:
    return any(map(locations.is_live, locations.find_rings(run_dir)))


def _unread(run_dir: Path) -> str:
    """Return a description of what the rings hold that no node agent has read."""
    ledger = read_ledger(locations.ledger_path(run_dir))
    rings, steps = 0, 0
    for path in locations.find_rings(run_dir):
        rings += 1
        try:
            reader = RingReader.open(path)
        except RingError:
            continue
        try:
            launch = (reader.identity.launch, reader.identity.attempt)
            read = ledger.closed_sequence if launch in ledger.launches else 0
            steps = max(steps, reader.state.committed_sequence - read)
        except (RingError, ValueError):
            continue
        finally:
            reader.close()
    return f"its {rings} rank(s) and its node agent were killed; {steps} step(s) were never read"


def _age_seconds(directory: Path) -> float:
    """Return the seconds since a directory's last change; QUIET_SECONDS if in the future."""
    paths = [directory, *_entries(directory)]
    newest = max((path.lstat().st_mtime for path in paths), default=0.0)
    age_seconds = time.time() - newest
    return age_seconds if age_seconds >= 0 else QUIET_SECONDS


def _abandoned_files(run_dir: Path) -> Iterator[Path]:
    """Yield temporary files of processes that were killed."""
    oldest = time.time() - _ABANDONED_SECONDS
    for directory in (run_dir, *_directories(run_dir)):
        for path in _entries(directory):
            hidden = path.name.startswith(".") and not path.is_dir()
            if hidden and (path.name.startswith(_AGENTS_OWN) or path.lstat().st_mtime < oldest):
                yield path


def _supervised(base: Path) -> list[Path]:
    return [path for path in _directories(base) if path.name.startswith(SUPERVISED_PREFIX)]


def _directories(directory: Path) -> list[Path]:
    return [path for path in _entries(directory) if path.is_dir() and not path.is_symlink()]


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
